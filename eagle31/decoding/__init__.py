"""Drafting token by token: speculative decoding, acceptance statistics, replay."""
