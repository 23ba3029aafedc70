"""The drafter of a run: its shape, its first weights, and checks of its export."""
