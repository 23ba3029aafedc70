"""Which conversations are held out, and which of the others training uses."""

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from eagle31.errors import UserError

_Indices = NDArray[np.int64]


@dataclass(frozen=True)
class Share:
    """How much of a source is used."""

    weight: float | None = None  # relative to the other sources' weights; None: all
    max_conversations: int | None = None


def chosen_prompts(ranks: NDArray[np.void], num_prompts: int) -> _Indices:
    """Return the first conversation with each of the prompts of lowest rank, at most so many."""
    _, first = np.unique(ranks, return_index=True)  # sorted by rank
    return first[:num_prompts].astype(np.int64)


def held_out_split(
    ranks: NDArray[np.void], num_held_out: int, *, field: str = "data.train"
) -> tuple[_Indices, _Indices]:
    """Hold out `num_held_out` prompts; return the indices of (train, held_out).

    All conversations with a held-out prompt are left out of training; held_out has the first of each prompt,
    by rank. The choice depends only on the texts of the prompts and the seed, not on their order.

    Raises:
        UserError: no training data would be left.
    """
    num_different = len(np.unique(ranks))
    if num_different <= num_held_out:
        remedy = (
            f"There are {num_different} different prompts and {num_held_out} to hold out; give more data, or "
            "lower data.num_validation and data.num_test."
        )
        raise UserError(field, f"{len(ranks)} conversations", remedy)
    held_out = chosen_prompts(ranks, num_held_out)
    return np.flatnonzero(~np.isin(ranks, ranks[held_out])), held_out


def chosen_mixture(
    sources: NDArray[np.int32], shares: Mapping[str, Share], seed: int, *, field: str = "data.sources"
) -> _Indices:
    """Return the conversations that training uses, in order.

    With weights it is the largest choice in which the sources' numbers of conversations have the proportions
    of the weights and no conversation is repeated. What is chosen of a source is random, and a larger choice
    contains a smaller one.

    Args:
        sources: the source of each conversation, an index into `shares`. [C]

    Raises:
        UserError: a source has no conversations left, or so few that another source has none.
    """
    chosen = [
        _limited(sources, index, share, name, seed) for index, (name, share) in enumerate(shares.items())
    ]
    weights = [share.weight for share in shares.values()]
    if None not in weights:
        chosen = _in_proportion(chosen, shares, field)
    return np.sort(np.concatenate(chosen))


def _limited(sources: NDArray[np.int32], index: int, share: Share, name: str, seed: int) -> _Indices:
    members = np.flatnonzero(sources == index)
    if share.weight is None and share.max_conversations is None:
        return members
    order = np.random.default_rng([seed, zlib.crc32(name.encode())]).permutation(len(members))
    return members[order[: share.max_conversations]]


def _in_proportion(chosen: Sequence[_Indices], shares: Mapping[str, Share], field: str) -> list[_Indices]:
    weights = np.array([share.weight for share in shares.values()])
    numbers = np.array([len(one) for one in chosen])
    scale = (numbers / weights).min()
    # A product such as 0.3 * 10 / 0.3 may be just below the whole number.
    used = np.minimum(numbers, np.floor(scale * weights + 1e-6).astype(np.int64))
    scarce = list(shares)[int((numbers / weights).argmin())]
    for name, count in zip(shares, used, strict=True):
        if not count:
            remedy = (
                f"No conversation of {name} would be used, because {scarce} has only "
                f"{len(chosen[list(shares).index(scarce)]):,}; give {name} a larger weight."
            )
            raise UserError(f"{field}.{name}.weight", shares[name].weight, remedy)
    return [one[:count] for one, count in zip(chosen, used, strict=True)]
