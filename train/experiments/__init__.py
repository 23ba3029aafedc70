"""Experiments: they train drafters under several settings and compare what comes out."""
