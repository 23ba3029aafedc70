"""Runs side by side: which drafter is better, and where."""
