"""EAGLE 3.1 drafters: the model and its maths."""
