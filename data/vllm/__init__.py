"""vLLM runs the target: a connector inside it, a client outside, an engine of the run's own."""
