"""TorchSpec's engines run the target."""
