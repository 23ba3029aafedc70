"""Checkpoints that vLLM loads: writing, reading, checking."""
