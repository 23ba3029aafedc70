"""Who runs the target in a run: transformers, vLLM, TorchSpec."""
