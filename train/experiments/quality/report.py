"""The report of the benchmark: figures for the JSON file, a table for the terminal, and a picture."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from train.experiments.quality.curves import (
    UNTRAINED,
    Curve,
    acceptance_lengths,
    intervals,
    lengths_after,
    levels_between,
    minutes_until,
    training_minutes,
)
from train.reporting.colors import COLORS
from train.reporting.plots import Panel, save_png
from train.resampling.bootstrap import Floats, Interval, Resamples, interval
from train.tables import aligned

_LIGHT = {name: light for name, (light, _) in COLORS.items()}
# eagle31's curves first, then the peers'.
_OURS = (_LIGHT["accent"], "#3aa17e", "#7a5ca8", "#20739f", "#62b492", "#a487c9")
_PEERS = (_LIGHT["warning"], _LIGHT["muted"])


@dataclass(frozen=True)
class Measured:
    """A curve with its resamples."""

    curve: Curve
    is_peer: bool
    lengths: Floats  # [1 + B, C]
    minutes: Floats  # [1 + B, C]

    @property
    def end(self) -> Interval:
        """The acceptance length after the last step."""
        return interval(self.lengths[:, -1])


@dataclass(frozen=True)
class Goal:
    """An acceptance length, and how long each curve needs until it has it."""

    name: str
    level: Interval
    minutes: list[Interval]  # by curve
    times_sooner: list[Interval] | None  # than the peer or side that the goal is of; None for a round number


def measure(curves: Sequence[tuple[Curve, bool]], resamples: Resamples) -> list[Measured]:
    """Return the curves, each with whether it is a peer's, with their resamples."""
    return [
        Measured(curve, peer, acceptance_lengths(curve, resamples), training_minutes(curve, resamples))
        for curve, peer in curves
    ]


def goals(
    measured: Sequence[Measured], levels: Sequence[float], references: Sequence[Measured]
) -> list[Goal]:
    """Return when the curves have round acceptance lengths, and what the references have at their end."""
    found = [
        Goal(
            f"{level:g}",
            Interval(level, level, level),
            [
                interval(minutes_until(one.minutes, one.lengths, np.full(len(one.lengths), level)))
                for one in measured
            ],
            None,
        )
        for level in levels
    ]
    for reference in references:
        level, its_minutes = reference.lengths[:, -1], reference.minutes[:, -1]
        until = [minutes_until(one.minutes, one.lengths, level) for one in measured]
        # A curve that never has it is 0 times sooner.
        sooner = [interval(its_minutes / (minutes + 1e-9)) for minutes in until]
        name = f"end of {reference.curve.name}"
        found.append(Goal(name, interval(level), [interval(minutes) for minutes in until], sooner))
    return found


def default_references(measured: Sequence[Measured], adamw: str) -> list[Measured]:
    """Return the peer that is best at its end, and eagle31's longest AdamW, as far as they were measured."""
    peers = [one for one in measured if one.is_peer]
    own = [one for one in measured if one.curve.name.startswith(f"{adamw},")]
    best = sorted(peers, key=lambda one: one.end.value)[-1:]
    return best + sorted(own, key=lambda one: float(one.minutes[0, -1]))[-1:]


def default_levels(measured: Sequence[Measured]) -> list[float]:
    return levels_between([one.end.value for one in measured])


def default_marks(measured: Sequence[Measured]) -> list[float]:
    """Return the minutes at which curves of a number of steps are compared: when the first of them ends."""
    shortest = min(float(one.minutes[0, -1]) for one in measured)
    return [round(shortest / 2, 3), round(shortest, 3)]


def table_lines(
    measured: Sequence[Measured], found: Sequence[Goal], marks: Sequence[float], k: int
) -> list[str]:
    """Return the two tables."""
    heads = [f"after {mark:g} min" for mark in marks]
    rows = [["acceptance length", "steps", "minutes", *heads, "at the end"]]
    for one in measured:
        cells = [_shown(interval(lengths_after(one.minutes, one.lengths, mark))) for mark in marks]
        minutes = f"{one.minutes[0, -1]:.2f}"
        rows.append([one.curve.name, f"{one.curve.steps[-1]:,}", minutes, *cells, _shown(one.end)])
    lines = [f"k = {k}, replay; in brackets 95 % of the resamples of prompts and seeds", ""]
    lines += aligned(rows)
    lines += ["", "minutes of training until an acceptance length"]
    rows = [
        ["", *(f"{goal.name} ({goal.level.value:.2f})" if goal.times_sooner else goal.name for goal in found)]
    ]
    for index, one in enumerate(measured):
        rows.append([one.curve.name, *(_until(goal, index) for goal in found)])
    return lines + aligned(rows)


def to_json(measured: Sequence[Measured], found: Sequence[Goal], marks: Sequence[float]) -> dict[str, Any]:
    """Return the figures; infinite and missing values are null."""
    curves = []
    for one in measured:
        curve = one.curve
        lengths = 1 + curve.accepted.sum(axis=2) / curve.drafts.sum(axis=2)
        curves.append(
            {
                "name": curve.name,
                "steps": list(curve.steps),
                "minutes": curve.minutes.tolist(),
                "supervised_positions": curve.supervised.tolist(),
                "acceptance_length_by_seed": lengths.tolist(),
                "acceptance_length": [_finite(value) for value in intervals(one.lengths)],
                "after_minutes": {
                    f"{mark:g}": _finite(interval(lengths_after(one.minutes, one.lengths, mark)))
                    for mark in marks
                },
                "drafts": curve.drafts.astype(int).tolist(),
                "accepted": curve.accepted.astype(int).tolist(),
            }
        )
    until = [
        {
            "name": goal.name,
            "level": _finite(goal.level),
            "minutes": {
                one.curve.name: _finite(value) for one, value in zip(measured, goal.minutes, strict=True)
            },
            "times_sooner": goal.times_sooner
            and {
                one.curve.name: _finite(value) for one, value in zip(measured, goal.times_sooner, strict=True)
            },
        }
        for goal in found
    ]
    return {"curves": curves, "minutes_until": until}


def plot(measured: Sequence[Measured], path: Path, *, k: int, note: str) -> None:
    """Plot acceptance length over minutes, steps and supervised positions."""
    panels = [
        Panel(
            "minutes",
            "Acceptance length over training time",
            f"greedy, k = {k}; the band holds 95 % of the resamples",
            lambda axes: _draw(axes, measured, "minutes"),
        ),
        Panel(
            "steps",
            "Over optimizer steps",
            "the same rows in each step",
            lambda axes: _draw(axes, measured, "steps"),
        ),
        Panel(
            "supervised",
            "Over supervised positions",
            note,
            lambda axes: _draw(axes, measured, "supervised"),
        ),
    ]
    save_png(panels, path, panel_inches=5.4)


def _draw(axes: Axes, measured: Sequence[Measured], over: str) -> None:
    colors = {True: iter(_PEERS * len(measured)), False: iter(_OURS * len(measured))}
    for one in measured:
        x = {
            "minutes": one.minutes[0],
            "steps": np.array(one.curve.steps, dtype=float),
            "supervised": one.curve.supervised.mean(axis=0),
        }[over]
        found = intervals(one.lengths)
        color = next(colors[one.is_peer])
        y = [value.value for value in found]
        low, high = [value.low for value in found], [value.high for value in found]
        axes.fill_between(
            [0.0, *x], [UNTRAINED, *low], [UNTRAINED, *high], color=color, alpha=0.15, linewidth=0
        )
        style = "--" if one.is_peer else "-"
        axes.plot(
            [0.0, *x],
            [UNTRAINED, *y],
            style,
            color=color,
            linewidth=1.8,
            marker="o",
            markersize=3,
            label=one.curve.name,
        )
    axes.set_xlim(left=0)
    axes.set_xlabel(
        {"minutes": "minutes of training", "steps": "steps", "supervised": "supervised positions"}[over]
    )
    axes.set_ylabel("acceptance length")
    if over == "minutes":
        # Below the axes: a legend among so many curves covers some.
        axes.legend(loc="upper left", bbox_to_anchor=(0.0, -0.16), ncols=2, frameon=False, fontsize="small")
    if over == "supervised":
        axes.xaxis.set_major_formatter(lambda number, _: f"{number / 1000:,.0f}k")


def _shown(value: Interval) -> str:
    if math.isnan(value.value):
        return "-"
    return f"{value.value:.2f} ({value.low:.2f}-{value.high:.2f})"


def _until(goal: Goal, index: int) -> str:
    minutes = goal.minutes[index]
    if math.isinf(minutes.value):
        return "not reached"
    high = "never" if math.isinf(minutes.high) else f"{minutes.high:.2f}"
    shown = f"{minutes.value:.2f} ({minutes.low:.2f}-{high})"
    if goal.times_sooner is not None:
        sooner = goal.times_sooner[index]
        shown += f", {sooner.value:.1f}x ({sooner.low:.1f}-{sooner.high:.1f})"
    return shown


def _finite(value: Interval) -> dict[str, float | None]:
    return {name: number if math.isfinite(number) else None for name, number in asdict(value).items()}
