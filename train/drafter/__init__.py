"""Which drafter a run has: its shape, a checkpoint to start from, checks of an export."""
