"""The recipe's schema, with a file for each group of settings."""
