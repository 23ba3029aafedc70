"""Online training for a long time, while what runs the target is killed every minute."""
