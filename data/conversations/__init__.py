"""Conversations: reading, choosing and rendering them to tokens and loss masks."""
