"""The code that runs inside vLLM."""
