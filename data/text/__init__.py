"""From files and data sets of conversations to token ids and loss masks."""
