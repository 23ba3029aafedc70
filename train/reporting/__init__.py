"""What a person reads about a finished run."""
