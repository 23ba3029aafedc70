"""The recipe's schema, one file per group of settings."""
