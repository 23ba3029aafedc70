"""Acceptance lengths from speculative decoding, in transformers and in vLLM."""
