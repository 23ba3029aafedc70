"""Transports of hidden states from a process that captures to a trainer."""
