"""From conversations to batches of captured hidden states."""
