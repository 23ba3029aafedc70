"""What a machine has and lacks for a run."""
