"""The frozen target: loading it, its tokenizer, modules, head and config."""
