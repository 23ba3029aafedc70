"""Hidden states from TorchSpec: its engines, which Ray runs, and its store."""
