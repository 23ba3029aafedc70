"""The training loop under DeepSpeed."""
