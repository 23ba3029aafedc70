"""Everything from conversations to batches of captured hidden states."""
