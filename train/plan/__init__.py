"""The plan: sizes, memory and time of a run, before any weight is loaded."""
