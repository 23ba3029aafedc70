"""What a drafter is: its configuration, its modules, its vocabulary."""
