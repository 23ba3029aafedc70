"""The benchmark of acceptance length over training time, against other trainers."""
