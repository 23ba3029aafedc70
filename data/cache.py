"""The directory for files that outlive a run and can be made again."""

import os
from pathlib import Path


def cache_directory() -> Path:
    """Return the directory in EAGLE31_CACHE; by default `eagle31` in the user's cache directory."""
    own = os.environ.get("EAGLE31_CACHE")
    if own:
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "eagle31"
