"""Capture by TorchSpec's inference engines."""
