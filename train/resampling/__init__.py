"""Intervals from resamples of the prompts."""
