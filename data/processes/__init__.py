"""Child processes that are driven by JSON lines."""
