"""The form of a training checkpoint, and the model engine's state in it."""
