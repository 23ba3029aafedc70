"""The comparison's panels."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator, PercentFormatter

from train.reporting.comparison.differences import Place
from train.reporting.comparison.history import validations
from train.reporting.comparison.runs import Run
from train.reporting.plots import INK, MUTED, PALE, Panel, label_ends, percent_axis, step_axis
from train.resampling.bootstrap import Interval

# Okabe and Ito's, which differ for every kind of color vision, on a light and a dark page alike.
COLORS = ("#5c6570", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#a6761d", "#56b4e9", "#e69f00")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
_ROW_INCHES = 0.17
_LEGEND_ROWS = 1.4
_MARGIN_INCHES = 1.25


def comparison_panels(runs: Sequence[Run], found: Sequence[Place]) -> dict[str, Panel]:
    """Return the panels that there is data for, by name.

    Args:
        runs: all can be compared with the first.
        found: what they have in common.
    """
    k = _shown_length(runs, found)
    chosen = [place for place in found if place.group == found[0].group or place.k == k]
    num_marks = len(chosen) * max(len(runs) - 1, 1)
    panels = [
        Panel(
            "difference",
            "Which is better, where",
            f"relative to {runs[0].name}; bars: 95 % interval",
            lambda axes: _draw_differences(axes, runs, chosen),
            height=_MARGIN_INCHES + max(_ROW_INCHES * num_marks, 0.26 * len(chosen), 1.6),
        ),
        Panel(
            "lengths",
            "Acceptance length by draft length",
            f"{found[0].group}; shaded: 95 % interval over prompts",
            lambda axes: _draw_lengths(axes, runs, found),
        ),
        Panel(
            "positions",
            "Acceptance by position in the draft",
            f"{found[0].group}, of drafts accepted so far",
            lambda axes: _draw_positions(axes, runs),
        ),
    ]
    if any(validations(run) for run in runs):
        note = "temperature 0, the validation's longest drafts"
        panels += [
            Panel(
                "steps",
                "Acceptance length over training",
                note,
                lambda axes: _draw_history(axes, runs, in_minutes=False),
            ),
            Panel(
                "minutes",
                "Acceptance length over time",
                note,
                lambda axes: _draw_history(axes, runs, in_minutes=True),
            ),
        ]
    cells = [place for place in found if place.cell]
    if cells:
        panels.append(
            Panel(
                "cells",
                "Acceptance length by cell of the matrix",
                f"k = {k}; bars: 95 % interval over prompts",
                lambda axes: _draw_cells(axes, runs, cells),
                height=_MARGIN_INCHES + 0.26 * len(cells),
            )
        )
    return {panel.name: panel for panel in panels}


def _shown_length(runs: Sequence[Run], found: Sequence[Place]) -> int:
    """Return the draft length of sampling and cells in the plots: the evaluation's, or the longest."""
    lengths = [place.k for place in found if place.group == found[0].group]
    k = runs[0].evaluation["k"]
    return k if k in lengths else lengths[-1]


def _draw_differences(axes: Axes, runs: Sequence[Run], chosen: Sequence[Place]) -> None:
    axes.axvline(0, color=COLORS[0], linewidth=1.2)
    num = len(runs) - 1
    for index in range(1, len(runs)):
        offset = 0.62 * ((index - 1) - (num - 1) / 2) / max(num, 1)
        rows = [row + offset for row in range(len(chosen))]
        ratios = [place.ratios[index] for place in chosen]
        shifted = [Interval(one.value - 1, one.low - 1, one.high - 1) for one in ratios]
        _mark_rows(axes, rows, shifted, index, runs[index].name)
    axes.set_yticks(range(len(chosen)), [_place_name(place, chosen[0].group) for place in chosen])
    axes.set_ylim(len(chosen) - 0.4, -0.6 - _LEGEND_ROWS)
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes.set_xlabel(f"shorter than {runs[0].name}  |  longer")
    _rows_style(axes)
    _legend(axes)


def _place_name(place: Place, first: str) -> str:
    return f"k = {place.k}" if place.group == first else f"{place.group}, k = {place.k}"


def _draw_lengths(axes: Axes, runs: Sequence[Run], found: Sequence[Place]) -> None:
    chosen = [place for place in found if place.group == found[0].group]
    k = [place.k for place in chosen]
    labels = []
    for index, run in enumerate(runs):
        lengths = [place.lengths[index] for place in chosen]
        low, high = [one.low for one in lengths], [one.high for one in lengths]
        values, color = [one.value for one in lengths], COLORS[index]
        axes.fill_between(k, low, high, color=color, alpha=0.12, linewidth=0)
        axes.plot(k, values, color=color, marker=MARKERS[index], markersize=4.5)
        labels.append((run.name, k[-1], values[-1], color))
    axes.set(xlabel="draft length k (tokens)", ylabel="tokens per target forward", xticks=k)
    axes.set_ylim(bottom=0.95)
    label_ends(axes, labels)


def _draw_positions(axes: Axes, runs: Sequence[Run]) -> None:
    labels = []
    for index, run in enumerate(runs):
        rates = run.evaluation["trained"]["by_draft_length"][-1]["conditional_acceptance"]
        positions = range(1, len(rates) + 1)
        axes.plot(positions, rates, color=COLORS[index], marker=MARKERS[index], markersize=4.5)
        labels.append((run.name, len(rates), rates[-1], COLORS[index]))
    axes.set(xlabel="position in the draft")
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    percent_axis(axes, "accepted", top=1.0)
    label_ends(axes, labels)


def _draw_history(axes: Axes, runs: Sequence[Run], in_minutes: bool) -> None:
    labels = []
    for index, run in enumerate(runs):
        points = validations(run)
        if not points:
            continue
        x = [one.seconds / 60 if in_minutes else one.step for one in points]
        y = [one.acceptance_length for one in points]
        axes.plot(x, y, color=COLORS[index], marker=MARKERS[index], markersize=3.5)
        labels.append((run.name, x[-1], y[-1], COLORS[index]))
    axes.set_ylabel("tokens per target forward")
    axes.set_ylim(bottom=0.95)
    if in_minutes:
        axes.set_xlabel("minutes of training")
    else:
        step_axis(axes)
    label_ends(axes, labels)


def _draw_cells(axes: Axes, runs: Sequence[Run], cells: Sequence[Place]) -> None:
    num = len(runs)
    for index, run in enumerate(runs):
        offset = 0.36 * (index - (num - 1) / 2) / max(num - 1, 1)
        lengths = [place.lengths[index] for place in cells]
        rows = [row + offset for row in range(len(cells))]
        _mark_rows(axes, rows, lengths, index, run.name)
    axes.set_yticks(range(len(cells)), [place.group for place in cells])
    axes.set_ylim(len(cells) - 0.4, -0.6 - _LEGEND_ROWS)
    axes.set_xlabel("tokens per target forward")
    _rows_style(axes)
    _legend(axes)


def _mark_rows(axes: Axes, rows: Sequence[float], values: Sequence[Interval], index: int, label: str) -> None:
    """Draw a point with a bar from its low to its high bound in each row, in the style of a run."""
    middle = [one.value for one in values]
    below, above = [one.value - one.low for one in values], [one.high - one.value for one in values]
    axes.errorbar(
        middle,
        rows,
        xerr=np.array([below, above]).clip(min=0),  # a resampled interval need not hold the value
        linestyle="",
        elinewidth=1.4,
        color=COLORS[index],
        marker=MARKERS[index],
        markersize=4.5,
        label=label,
    )


def _rows_style(axes: Axes) -> None:
    axes.grid(False, axis="y")
    axes.grid(True, axis="x", color=PALE, alpha=0.5)
    axes.tick_params(axis="y", labelcolor=INK)
    axes.spines["bottom"].set_color(MUTED)


def _legend(axes: Axes) -> None:
    # On a narrow page names in one row would leave the figure.
    axes.legend(loc="upper left", ncols=2, frameon=False, borderpad=0.2, handletextpad=0.2, columnspacing=1)
