"""Reading conversations from files and data sets, and changing them."""
