"""The study: which change from EAGLE 3 to EAGLE 3.1 keeps the acceptance length, and where."""
