"""Reading conversations from files and data sets, and turning them into token ids and loss masks."""
