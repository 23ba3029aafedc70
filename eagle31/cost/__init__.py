"""FLOPs and memory of a training step by formula."""
