"""A load test of capture: servers that several clients share, while processes are killed and stopped."""
