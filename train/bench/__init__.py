"""Measuring against others."""
