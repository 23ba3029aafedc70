"""From captured samples to packed rows."""
