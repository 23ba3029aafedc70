"""The study's numbers: acceptance lengths of the variants in each cell, and their ratios, with intervals."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

import numpy as np

from train.evaluation.matrix import Cell
from train.experiments.quality.curves import drawn_seeds
from train.resampling.bootstrap import Floats, Interval, Resamples, interval

ALL = "all"  # conditions

# A cell, and by variant what was measured of each seed.
MeasuredCell: TypeAlias = "tuple[Cell, Mapping[str, Sequence[Mapping[str, Any]]]]"


@dataclass(frozen=True)
class CellCounts:
    """One variant in one cell: S seeds, K draft lengths, P prompts."""

    drafts: Floats  # [S, K, P]
    accepted: Floats  # [S, K, P], accepted tokens
    by_position: Floats  # [S, K, P], accepted tokens by position of the longest draft

    def of_prompts(self, cell: Cell, prompt_ids: Sequence[str]) -> "CellCounts":
        """Return the counts of some of the cell's prompts, in the given order."""
        places = [cell.prompt_ids.index(one) for one in prompt_ids]
        return CellCounts(self.drafts[..., places], self.accepted[..., places], self.by_position[..., places])

    @staticmethod
    def of(measured: Sequence[Mapping[str, Any]]) -> "CellCounts":
        """Join what was measured of each seed."""
        names = ("drafts", "accepted", "by_position")
        return CellCounts(*(np.array([one[name] for one in measured], dtype=float) for name in names))

    def lengths(self, k: int, resamples: Resamples) -> Floats:
        """Return the mean over seeds of the acceptance length at a draft length, [1 + B]."""
        return 1 + self._rates(self.accepted[:, k - 1], self.drafts[:, k - 1], resamples)

    def rates(self, position: int, resamples: Resamples) -> Floats:
        """Return the fraction of the longest drafts that are accepted up to a position, from 0; [1 + B]."""
        return self._rates(self.by_position[:, position], self.drafts[:, -1], resamples)

    def by_seed(self, k: int) -> list[float]:
        totals = self.accepted[:, k - 1].sum(-1) / self.drafts[:, k - 1].sum(-1)
        return [float(value) for value in 1 + totals]

    @staticmethod
    def _rates(accepted: Floats, drafts: Floats, resamples: Resamples) -> Floats:
        """[S, P] -> [1 + B], with seeds and prompts drawn."""
        found = (resamples.prompts @ accepted.T) / (resamples.prompts @ drafts.T).clip(min=1)
        mean: Floats = np.take_along_axis(found, drawn_seeds(accepted.shape[0], resamples), axis=1).mean(1)
        return mean


@dataclass(frozen=True)
class CellComparison:
    """All variants in one cell, by name."""

    name: str
    num_prompts: int
    mean_prompt_tokens: float
    lengths: dict[int, dict[str, Interval]]  # by draft length
    ratios: dict[int, dict[str, Interval]]  # to the reference, of the same resamples
    rates: dict[str, list[Interval]]  # by position of the longest draft
    by_seed: dict[int, dict[str, list[float]]]
    drift: dict[str, list[dict[str, Any]]]  # by variant and seed

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def compare(
    cell: Cell,
    measured: Mapping[str, Sequence[Mapping[str, Any]]],
    reference: str,
    draft_lengths: Sequence[int],
) -> CellComparison:
    """Compare the variants in one cell.

    An interval holds 95 % of the resamples of seeds and prompts. A ratio's two sides are computed with the
    same prompts in each resample.

    Args:
        measured: by variant, what was measured of each seed.
        reference: the variant that the others are divided by.
    """
    counts = {name: CellCounts.of(by_seed) for name, by_seed in measured.items()}
    num_prompts = next(iter(counts.values())).drafts.shape[-1]
    resamples = Resamples(num_prompts)
    lengths = {k: {name: one.lengths(k, resamples) for name, one in counts.items()} for k in draft_lengths}
    positions = range(next(iter(counts.values())).by_position.shape[1])
    return CellComparison(
        name=cell.name,
        num_prompts=num_prompts,
        mean_prompt_tokens=cell.mean_prompt_tokens,
        lengths={k: {name: interval(one) for name, one in found.items()} for k, found in lengths.items()},
        ratios={
            k: {name: interval(one / found[reference]) for name, one in found.items() if name != reference}
            for k, found in lengths.items()
            if reference in found
        },
        rates={
            name: [interval(one.rates(position, resamples)) for position in positions]
            for name, one in counts.items()
        },
        by_seed={k: {name: one.by_seed(k) for name, one in counts.items()} for k in draft_lengths},
        drift={name: [one["drift"] for one in by_seed if one["drift"]] for name, by_seed in measured.items()},
    )


@dataclass(frozen=True)
class Condition:
    """One setting over all domains: geometric means of ratios of acceptance lengths, by variant."""

    name: str  # empty for that of training
    num_domains: int
    ratios: dict[str, Interval]  # to the reference under the same condition
    kept: dict[str, Interval]  # to the same variant in the domains' base cells; all 1 for these


def by_condition(cells: Sequence[MeasuredCell], reference: str, k: int) -> list[Condition]:
    """Return the conditions in the order of the cells, and `ALL` of them.

    Both sides of a ratio have the same prompts and seeds in each resample. In `kept` these are the prompts
    that the cell and its base cell share.
    """
    bases = {cell.domain: (cell, measured) for cell, measured in cells if not cell.condition}
    ratios: dict[str, list[dict[str, Floats]]] = {}
    kept: dict[str, list[dict[str, Floats]]] = {}
    for cell, measured in cells:
        counts = {name: CellCounts.of(by_seed) for name, by_seed in measured.items()}
        logs = _log_lengths(counts, k)
        condition = cell.condition
        ratios.setdefault(condition, []).append(
            {name: one - logs[reference] for name, one in logs.items() if name != reference}
        )
        base, of_base = bases[cell.domain]
        common = [prompt for prompt in cell.prompt_ids if prompt in base.prompt_ids]
        here, there = (
            _log_lengths(
                {name: CellCounts.of(by_seed).of_prompts(side, common) for name, by_seed in all_.items()}, k
            )
            for side, all_ in ((cell, measured), (base, of_base))
        )
        kept.setdefault(condition, []).append({name: here[name] - there[name] for name in here})
    found = [
        Condition(name, len(ratios[name]), _geometric_means(ratios[name]), _geometric_means(kept[name]))
        for name in ratios
    ]
    every = [one for of_condition in ratios.values() for one in of_condition]
    others = [one for name, of_condition in kept.items() if name for one in of_condition]
    return [*found, Condition(ALL, len(bases), _geometric_means(every), _geometric_means(others))]


def _log_lengths(counts: Mapping[str, CellCounts], k: int) -> dict[str, Floats]:
    resamples = Resamples(next(iter(counts.values())).drafts.shape[-1])
    return {name: np.log(one.lengths(k, resamples)) for name, one in counts.items()}


def _geometric_means(logs: Sequence[Mapping[str, Floats]]) -> dict[str, Interval]:
    if not logs:
        return {}
    return {name: interval(np.exp(np.mean([one[name] for one in logs], axis=0))) for name in logs[0]}
