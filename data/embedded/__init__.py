"""The embedded target: a small language model trained on the running Python's own standard library."""
