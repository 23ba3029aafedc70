"""The conversations of several sources on disk, and which of them training uses."""
