"""The kinds of drafters."""

from eagle31.model.config import DrafterConfig
from eagle31.model.drafter import Drafter
from eagle31.model.dspark import DSparkDrafter
from eagle31.model.eagle import EagleDrafter


def new_drafter(config: DrafterConfig, with_head: bool = True) -> Drafter:
    """Return a drafter with untrained weights of PyTorch's defaults.

    Args:
        with_head: whether the draft head is a part of it.
    """
    kind = EagleDrafter if config.dspark is None else DSparkDrafter
    return kind(config, with_head)
