"""The ways from a process that captures to a trainer."""
