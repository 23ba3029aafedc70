"""Sources of the frozen target's hidden states."""
