"""The engines that run the target: transformers, vLLM."""
