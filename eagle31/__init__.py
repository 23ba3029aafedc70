"""EAGLE 3.1 drafters: the model, its training objective, decoding, and export."""
