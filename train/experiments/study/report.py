"""The study's tables, as Markdown, and its picture."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes

from train.experiments.study.comparison import CellComparison, Condition
from train.reporting.colors import COLORS
from train.reporting.plots import Panel, save_png
from train.resampling.bootstrap import Interval

_LIGHT = {name: light for name, (light, _) in COLORS.items()}
_COLORS = (_LIGHT["warning"], "#62b492", "#7a5ca8", _LIGHT["accent"], _LIGHT["muted"], "#1c2127")
_MARKERS = "os^Dv*"
_BASE = "as in training"


def markdown(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a table whose first row is the header."""
    head, *rest = rows
    lines = [head, ["---"] * len(head), *rest]
    return [f"| {' | '.join(line)} |" for line in lines]


def length_table(cells: Sequence[CellComparison], k: int) -> list[str]:
    """Return the acceptance length of each variant in each cell."""
    names = list(cells[0].lengths[k])
    rows = [["cell", "prompts", "prompt tokens", *names]]
    for cell in cells:
        shown = [_shown(cell.lengths[k][name]) for name in names]
        rows.append([cell.name, str(cell.num_prompts), f"{cell.mean_prompt_tokens:.0f}", *shown])
    return markdown(rows)


def condition_table(conditions: Sequence[Condition]) -> list[str]:
    """Return the ratios to the reference under each condition, geometric means over domains."""
    names = list(conditions[0].ratios)
    rows = [["condition", "domains", *names]]
    for one in conditions:
        rows.append([one.name or _BASE, str(one.num_domains), *(_marked(one.ratios[name]) for name in names)])
    return markdown(rows)


def kept_table(conditions: Sequence[Condition]) -> list[str]:
    """Return what each variant keeps of its acceptance length under each condition."""
    changed = [one for one in conditions if one.name and one.kept]
    names = list(changed[0].kept) if changed else []
    rows = [["condition", "domains", *names]]
    for one in changed:
        rows.append([one.name, str(one.num_domains), *(_shown(one.kept[name]) for name in names)])
    return markdown(rows)


def position_table(cell: CellComparison) -> list[str]:
    """Return how many of the longest drafts are accepted up to each position, in percent."""
    names = list(cell.rates)
    num = len(cell.rates[names[0]])
    rows = [["position", *(str(position + 1) for position in range(num))]]
    for name in names:
        rows.append([name, *(f"{100 * rate.value:.1f}" for rate in cell.rates[name])])
    return markdown(rows)


def seed_table(cell: CellComparison, k: int) -> list[str]:
    """Return the acceptance length of each seed."""
    by_seed = cell.by_seed[k]
    num = max(map(len, by_seed.values()))
    rows = [["variant", *(f"seed {index + 1}" for index in range(num))]]
    for name, values in by_seed.items():
        rows.append([name, *(f"{value:.2f}" for value in values)])
    return markdown(rows)


def drift_table(cells: Sequence[CellComparison]) -> list[str]:
    """Return attention and state at the first, fourth and last step of a draft, means over seeds."""
    rows = [["cell", "variant", "step", "sink", "own tokens", "RMS of the state fed back"]]
    for cell in cells:
        for name, records in cell.drift.items():
            if not records:
                continue
            num = min(len(record["depth"]) for record in records)
            for step in sorted({0, min(3, num - 1), num - 1}):
                of_step = [record["depth"][step] for record in records]
                sink, own = (
                    float(np.mean([np.mean([layer[kind] for layer in one["layers"]]) for one in of_step]))
                    for kind in ("sink", "own")
                )
                rms = float(np.mean([one["state_rms"] for one in of_step]))
                shown = [f"{100 * sink:.1f} %", f"{100 * own:.1f} %", f"{rms:.2f}"]
                rows.append([cell.name, name, str(step + 1), *shown])
    return markdown(rows)


def plot(
    first: CellComparison,
    conditions: Sequence[Condition],
    path: Path,
    *,
    k: int,
    reference: str,
    note: str,
) -> None:
    """Plot acceptance by position in the first cell, the ratios under all conditions, and the drift."""
    colors = dict(zip(first.rates, zip(_COLORS, _MARKERS, strict=True), strict=False))
    panels = [
        Panel(
            "positions",
            "Acceptance by position",
            f"{first.name}, k = {len(first.rates[reference])}, greedy; band: 95 % over seeds and prompts",
            lambda axes: _draw_positions(axes, first, colors),
        ),
        Panel(
            "ratios",
            f"Acceptance length, divided by {reference}'s",
            f"k = {k}, mean over {conditions[0].num_domains} domains; line: 95 % over seeds and prompts",
            lambda axes: _draw_ratios(axes, conditions, colors),
        ),
        Panel(
            "drift",
            "Attention on the draft's own tokens",
            note,
            lambda axes: _draw_own_attention(axes, first, colors),
        ),
    ]
    save_png(panels, path, panel_inches=5.6)


def _draw_positions(axes: Axes, cell: CellComparison, colors: Mapping[str, tuple[str, str]]) -> None:
    for name, rates in cell.rates.items():
        color, marker = colors[name]
        x = range(1, len(rates) + 1)
        axes.fill_between(
            x, [r.low for r in rates], [r.high for r in rates], color=color, alpha=0.13, linewidth=0
        )
        axes.plot(x, [r.value for r in rates], color=color, marker=marker, markersize=4, label=name)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("position in the draft")
    axes.set_ylabel("drafts accepted up to here")
    axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f} %")
    axes.legend(loc="upper right", frameon=False, fontsize="small")


def _draw_ratios(axes: Axes, conditions: Sequence[Condition], colors: Mapping[str, tuple[str, str]]) -> None:
    axes.axvline(1, color=_LIGHT["muted"], linewidth=0.8)
    for row, one in enumerate(conditions):
        for index, (name, found) in enumerate(one.ratios.items()):
            color, marker = colors[name]
            y = row + 0.7 * ((index + 0.5) / len(one.ratios) - 0.5)
            axes.plot([found.low, found.high], [y, y], color=color, linewidth=1.2)
            axes.plot([found.value], [y], marker, color=color, markersize=3.5)
    axes.set_yticks(range(len(conditions)), [one.name or _BASE for one in conditions], fontsize=7.5)
    axes.set_ylim(len(conditions) - 0.4, -0.6)
    axes.set_xlabel("ratio")


def _draw_own_attention(axes: Axes, cell: CellComparison, colors: Mapping[str, tuple[str, str]]) -> None:
    for name, records in cell.drift.items():
        if not records:
            continue
        color, marker = colors[name]
        num = min(len(record["depth"]) for record in records)
        own = [
            np.mean([[layer["own"] for layer in record["depth"][step]["layers"]] for record in records])
            for step in range(num)
        ]
        axes.plot(range(1, num + 1), own, color=color, marker=marker, markersize=4, label=name)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("step of the draft")
    axes.set_ylabel("mean attention weight")
    axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f} %")


def _shown(value: Interval) -> str:
    return f"{value.value:.2f} ({value.low:.2f}-{value.high:.2f})"


def _marked(value: Interval) -> str:
    """Show a ratio, in bold where its interval does not hold 1."""
    shown = f"{value.value:.2f} ({value.low:.2f}-{value.high:.2f})"
    return f"**{shown}**" if value.low > 1 or value.high < 1 else shown
