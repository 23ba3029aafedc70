"""Acceptance length by real decoding."""
