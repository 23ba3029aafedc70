"""The sources of a run's conversations, and the choice among what they have."""
