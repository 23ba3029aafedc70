"""The client's side of capture and generation by vLLM."""
