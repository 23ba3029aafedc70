"""Runs vLLM with a drafter in a separate process."""
