"""Capturing the target's hidden states, into a store or straight into training."""
