"""Drafting one token after another: speculative decoding, acceptance statistics, replay."""
