"""What a recipe chooses about its text. The schema imports this module, so it imports no library."""

from enum import Enum


class Turns(Enum):
    """The assistant turns that become training samples."""

    all = "all"  # one sample in which every assistant turn is supervised
    last = "last"  # one sample in which the last assistant turn is supervised
    each = "each"  # one sample for each assistant turn, rendered as the last one, as in serving


class Overlong(Enum):
    """The treatment of samples with more than `max_tokens` tokens."""

    drop = "drop"  # leave the sample out
    cut = "cut"  # keep the first max_tokens
