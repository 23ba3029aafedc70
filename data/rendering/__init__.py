"""Turning conversations into token ids and loss masks, with the chat template of the target."""
