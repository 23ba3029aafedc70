"""What a run will take, before any weight is touched."""
