"""The data that a target does not take: how much a run may leave out, and what it says about them."""

from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path

from eagle31.errors import UserError

_MAX_FRACTION = 0.01
_ALWAYS_ALLOWED = 8  # a small dataset may lack this many, unless they are more than half of it
_SHOWN_REFUSALS = 8


def num_allowed(num_samples: int, max_fraction: float = _MAX_FRACTION) -> int:
    """Return how many samples, or conversations, may be left out."""
    return max(int(max_fraction * num_samples), min(_ALWAYS_ALLOWED, num_samples // 2))


def check_refusals(refused: Mapping[int, str], num_samples: int, remedy: str = "") -> None:
    """Raise UserError where more samples are refused than a capture may leave out.

    Args:
        refused: the reasons by sample id.
        num_samples: the number of samples of the dataset.
        remedy: what to do once the reason is removed.
    """
    allowed = num_allowed(num_samples)
    if len(refused) <= allowed:
        return
    *_, last = refused.values()
    raise UserError(
        "capture",
        f"{len(refused):,} of {num_samples:,} samples refused",
        f"At most {allowed:,} may be. The last one because: {last} {remedy}".strip(),
    )


def retry_remedy(directory: Path) -> str:
    """Return how the refused samples of a store are captured again."""
    return f"To have the next run capture them again: scripts/store retry {directory}"


def refusal_lines(
    refused: Mapping[int, str], num_samples: int, directory: Path | None = None
) -> Iterator[str]:
    """Yield lines that say how many samples were refused, and why the first ones.

    Args:
        refused: the reasons by sample id.
        directory: the store, if there is one.
    """
    if not refused:
        return
    yield f"{len(refused):,} of {num_samples:,} samples were refused, such as"
    for sample_id, reason in islice(refused.items(), _SHOWN_REFUSALS):
        yield f"  sample {sample_id}: {reason}"
    if directory is not None:
        yield retry_remedy(directory)
