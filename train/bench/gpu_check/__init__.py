"""The check of a machine with GPUs: its parts, their processes, and the report."""
