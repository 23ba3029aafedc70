"""Packing captured samples into rows and loading the rows of each step."""
