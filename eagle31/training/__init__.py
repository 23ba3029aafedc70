"""One training step: which rows are rolled out, the rollout, the loss."""
