"""Whether the rule for learning rates is near the best rate at every width of the drafter."""
