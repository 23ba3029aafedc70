"""Comparison of an export in vLLM with eagle31's evaluator."""
