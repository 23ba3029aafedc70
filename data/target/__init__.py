"""The frozen target: loading it, its modules, its head, its config."""
