"""vLLM runs the target: the client's side."""
