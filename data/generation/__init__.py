"""Answers that the target writes: through transformers or vLLM, kept in a file."""
