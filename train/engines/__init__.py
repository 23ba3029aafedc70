"""Where the target runs, and vLLM with a drafter."""
