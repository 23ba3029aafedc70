"""vLLM with a drafter, driven from outside."""
