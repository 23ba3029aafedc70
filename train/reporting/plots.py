"""The plots of a run: panels that draw on one pair of axes each, and their output as PNG and SVG."""

import io
import math
import re
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, to_hex
from matplotlib.figure import Figure
from matplotlib.font_manager import fontManager
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator, PercentFormatter

from train.reporting.colors import COLORS

INK, MUTED, RULE, ACCENT, PALE, _, _, _ = (light for light, _ in COLORS.values())
# The colors are ordered like the depths; the first draft token has the most contrast on either page.
LIGHT_RAMP = LinearSegmentedColormap.from_list("light", ["#14284f", "#20739f", "#62b492"])
DARK_RAMP = LinearSegmentedColormap.from_list("dark", ["#e9f5d3", "#5fc0b4", "#3b7db5"])
FONTS = ("Inter", "Helvetica Neue", "Helvetica", "Arial", "Liberation Sans", "DejaVu Sans")
NUM_BINS = 80  # points per training curve: enough for its shape without the noise


@dataclass(frozen=True)
class Panel:
    """One plot."""

    name: str
    title: str
    note: str  # the conditions of the numbers
    draw: Callable[[Axes], None]
    height: float = 3.1  # inches of the figure on the page
    label_inches: float = 0.0  # width of the labels on the left, where they are wide


def build_panels(
    metrics: Sequence[dict[str, Any]], evaluation: dict[str, Any], best_step: int | None = None
) -> dict[str, Panel]:
    """Return the panels that there is data for, by name.

    Args:
        metrics: the lines of metrics.jsonl.
        evaluation: the evaluation's results; may be empty.
        best_step: the step whose weights were exported.
    """
    train = [record for record in metrics if record["kind"] == "train" and record.get("depth")]
    validation = [record for record in metrics if record["kind"] == "validation"]
    found: list[Panel] = []
    if train:
        found += [
            Panel(
                "loss",
                "Training loss",
                "cross-entropy by token of the draft",
                lambda axes: _draw_depths(axes, train, "loss"),
            ),
            Panel(
                "agreement",
                "Greedy agreement",
                "draft tokens that are the target's first choice, training batches",
                lambda axes: _draw_depths(axes, train, "agreement"),
            ),
            Panel(
                "expected_acceptance",
                "Expected acceptance at temperature 1",
                "Σ min(p, q) per draft token, training batches",
                lambda axes: _draw_depths(axes, train, "expected_acceptance"),
            ),
        ]
    if validation:
        found.append(
            Panel(
                "replay",
                "Acceptance length over training",
                "temperature 0, by replay of held-out prompts",
                lambda axes: _draw_replay(axes, validation, best_step),
            )
        )
    if evaluation:
        trained = evaluation["trained"]["by_draft_length"]
        untrained = (evaluation.get("untrained") or {}).get("by_draft_length", [])
        note = f"temperature 0, by replay of {evaluation['num_prompts']} held-out prompts"
        interval_note = f"{note}; shaded: 95 % interval over prompts"
        draw = lambda axes: _draw_draft_length(axes, trained, untrained)  # noqa: E731
        found.append(Panel("draft_length", "Acceptance length by draft length", interval_note, draw))
        draw = lambda axes: _draw_positions(axes, trained[-1])  # noqa: E731
        note = f"k = {trained[-1]['k']}, {note}"
        found.append(Panel("positions", "Acceptance by position in the draft", note, draw))
    return {panel.name: panel for panel in found}


def save_png(panels: Sequence[Panel], path: Path, headline: str = "", panel_inches: float = 4.6) -> None:
    """Draw panels next to each other with titles and conditions, under an optional headline.

    All are as high as the highest one.
    """
    num_lines = max(len(_note_lines(panel, panel_inches)) for panel in panels)
    _save([[panel] for panel in panels], path, headline, panel_inches, num_lines)


def save_columns(
    columns: Sequence[Sequence[Panel]], path: Path, headline: str = "", panel_inches: float = 4.6
) -> None:
    """Draw columns of panels next to each other, like `save_png`. The panels of a column share its height."""
    _save(columns, path, headline, panel_inches, num_lines=1)


def _save(
    columns: Sequence[Sequence[Panel]], path: Path, headline: str, panel_inches: float, num_lines: int
) -> None:
    """Draw columns of panels; the notes of all get at least so many lines, which aligns titles of a row."""
    with matplotlib.rc_context(_style()):
        layout = ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1, wspace=0.04)
        height = max(sum(panel.height + 0.6 for panel in column) for column in columns)
        figure = Figure(figsize=(panel_inches * len(columns), height + 0.3 * bool(headline)), layout=layout)
        if headline:
            figure.suptitle(headline, x=0.012, ha="left", fontsize=13.5, fontweight="bold")
        num_rows = math.lcm(*map(len, columns))
        grid = figure.add_gridspec(num_rows, len(columns))
        for index, column in enumerate(columns):
            span = num_rows // len(column)
            for place, panel in enumerate(column):
                axes = figure.add_subplot(grid[place * span : (place + 1) * span, index])
                panel.draw(axes)
                note = _note_lines(panel, panel_inches)
                lines = note + [""] * (num_lines - len(note))
                axes.set_title("\n".join(lines), loc="left", fontsize=9, color=MUTED, pad=9)
                above = (0, 11.5 * len(lines) + 11)
                _label(axes, panel.title, (0, 1), above, INK, fontsize=11.5, fontweight="bold", fraction=True)
        figure.savefig(path, dpi=180, facecolor="white")


def _note_lines(panel: Panel, panel_inches: float) -> list[str]:
    return textwrap.wrap(panel.note, int((panel_inches - panel.label_inches) * 14.5))


def to_svg(panel: Panel) -> str:
    """Return the panel without its title as an `<svg>` element in the page's font and color scheme."""
    buffer = io.StringIO()
    # The browser chooses the font, so space is reserved for the widest of the usual ones.
    svg_style = {"font.family": "DejaVu Sans", "svg.fonttype": "none", "svg.hashsalt": panel.name}
    with matplotlib.rc_context(_style() | svg_style):
        figure = Figure(figsize=(4.9, panel.height), layout="constrained")
        panel.draw(figure.subplots())
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r' width="\S+pt" height="\S+pt"', f' role="img" aria-label="{panel.title}"', svg, count=1)
    svg = re.sub(r'<g id="[^"]*">', "<g>", svg)  # figures share their ids, which must be unique on a page
    svg = re.sub(r"font-family: [^;\"]*(; )?", "", svg)
    dark = dict(COLORS.values())
    for num in range(1, 33):
        dark.update(zip(ramp(num, LIGHT_RAMP), ramp(num, DARK_RAMP), strict=True))
    return re.sub(
        r"(?<=: )#[0-9a-f]{6}\b",
        lambda hit: f"light-dark({hit[0]}, {dark[hit[0]]})" if hit[0] in dark else hit[0],
        svg,
    )


def _draw_depths(axes: Axes, train: Sequence[dict[str, Any]], key: str) -> None:
    num_depths = max(len(record["depth"]) for record in train)
    labels = []
    for depth, color in enumerate(ramp(num_depths, LIGHT_RAMP)):
        records = [record for record in train if depth < len(record["depth"])]
        x, y = _bin_means([r["step"] for r in records], [r["depth"][depth][key] for r in records])
        axes.plot(x, y, color=color, marker="o" if len(x) == 1 else "", markersize=4)
        labels.append((f"token {depth + 1}", x[-1], y[-1], color))
    if key == "loss":
        axes.set_ylabel("nats per token")
    else:
        highest = max((y for _, _, y, _ in labels if math.isfinite(y)), default=1.0)
        percent_axis(axes, "of draft tokens", top=min(1.0, 0.1 * math.ceil(10 * highest + 0.5)))
    step_axis(axes)
    label_ends(axes, labels)


def _draw_replay(axes: Axes, validation: Sequence[dict[str, Any]], best_step: int | None) -> None:
    draft_lengths = sorted(
        {int(k) for record in validation for k in record["acceptance_length"]}, reverse=True
    )
    labels = []
    for k, color in zip(draft_lengths, ramp(len(draft_lengths), LIGHT_RAMP), strict=True):
        records = [record for record in validation if str(k) in record["acceptance_length"]]
        x = [record["step"] for record in records]
        y = [record["acceptance_length"][str(k)] for record in records]
        axes.plot(x, y, color=color, marker="o", markersize=3.5)
        labels.append((f"k = {k}", x[-1], y[-1], color))
    axes.set_ylabel("tokens per target forward")
    axes.set_ylim(bottom=0.95)
    if best_step is not None:
        axes.axvline(best_step, color=MUTED, linewidth=1, linestyle=(0, (1, 2.5)), zorder=1)
        _label(axes, f"best: {best_step:,}", (best_step, axes.get_ylim()[0]), (-4, 4), MUTED, ha="right")
    step_axis(axes)
    label_ends(axes, labels)


def _draw_draft_length(
    axes: Axes, trained_rows: Sequence[dict[str, Any]], untrained_rows: Sequence[dict[str, Any]]
) -> None:
    k = [row["k"] for row in trained_rows]
    trained = [row["acceptance_length"] for row in trained_rows]
    # The perfect line leaves the axes where drafts are long and few of their tokens are accepted.
    top = min(k[-1] + 1.35, 1.3 * max(row["high"] for row in trained_rows))
    axes.set(xlim=(k[0] - 0.3, k[-1] + 0.3), ylim=(0.75, top), xticks=k)
    axes.set(xlabel="draft length k (tokens)", ylabel="tokens per target forward")
    axes.plot(k, [n + 1 for n in k], color=MUTED, linewidth=1, linestyle=(0, (1, 2.5)))
    labels = [("trained", k[-1], trained[-1], ACCENT)]
    if k[-1] + 1 < top:
        labels.append(("perfect", k[-1], k[-1] + 1, MUTED))
    else:
        _label(axes, "perfect", (top - 1, top), (5, -12), MUTED)
    if untrained_rows:
        untrained = [row["acceptance_length"] for row in untrained_rows]
        axes.plot(k, untrained, color=MUTED, marker="o", markersize=4)
        labels.append(("untrained", k[-1], untrained[-1], MUTED))
    low, high = ([row[name] for row in trained_rows] for name in ("low", "high"))
    axes.fill_between(k, low, high, color=PALE, linewidth=0, zorder=1)
    axes.plot(k, trained, color=ACCENT, marker="o", markersize=5.5, linewidth=2.2)
    for n, value in zip(k, trained, strict=True):
        # Near the perfect line there is only room below.
        offset = (0, -17) if n + 1 - value < 0.075 * top else (0, 7)
        _label(axes, f"{value:.2f}", (n, value), offset, ACCENT, ha="center", fontweight="bold")
    label_ends(axes, labels)


def _draw_positions(axes: Axes, stats: dict[str, Any]) -> None:
    bars = (
        ("of all drafts", stats["absolute_acceptance"], ACCENT, -0.205),
        ("of drafts accepted so far", stats["conditional_acceptance"], PALE, 0.205),
    )
    positions = np.arange(1, stats["k"] + 1)
    for name, rates, color, offset in bars:
        axes.bar(positions + offset, rates, 0.39, color=color, label=name)
        for position, rate in zip(positions, rates, strict=True):
            _label(axes, f"{100 * rate:.0f}", (position + offset, rate), (0, 3), INK, ha="center")
    axes.set(xticks=positions, xlabel="position in the draft")
    percent_axis(axes, "accepted", top=1.2)
    axes.set_yticks(np.linspace(0, 1, 6))
    axes.legend(loc="upper right", ncols=2, frameon=False, borderpad=0, handlelength=0.9, borderaxespad=0)


def _bin_means(steps: Sequence[float], values: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
    """Return means over at most NUM_BINS runs of neighbouring points. float64 [N] -> [M], [M]."""
    size = -(-len(steps) // NUM_BINS)
    starts = np.arange(0, len(steps), size)
    counts = np.diff([*starts, len(steps)])
    x, y = (np.add.reduceat(np.asarray(series, dtype=float), starts) / counts for series in (steps, values))
    return x, y


def label_ends(axes: Axes, labels: Sequence[tuple[str, float, float, str]]) -> None:
    """Label each (text, x, y, color) curve to the right of its end; move labels apart that would overlap."""
    shown = sorted((label for label in labels if math.isfinite(label[2])), key=lambda label: label[2])
    bottom, top = axes.get_ylim()
    gap = 0.062 * (top - bottom)
    heights: list[float] = []
    for _, _, y, _ in shown:
        heights.append(max(y, heights[-1] + gap) if heights else y)
    # All labels move down by the mean of the shifts, so that they stay next to their curves.
    pushed = [height - y for height, (_, _, y, _) in zip(heights, shown, strict=True)]
    shift = sum(pushed) / max(len(pushed), 1)
    right = axes.get_xlim()[1]
    for height, (text, _, _, color) in zip(heights, shown, strict=True):
        _label(axes, text, (right, height - shift), (5, 0), color, va="center")


def _label(
    axes: Axes,
    text: str,
    xy: tuple[float, float],
    offset: tuple[float, float],
    color: str,
    fraction: bool = False,
    **kwargs: Any,
) -> None:
    """Write text `offset` points away from a data point, or from a fraction of the axes."""
    where = "axes fraction" if fraction else "data"
    axes.annotate(text, xy, offset, where, "offset points", color=color, annotation_clip=False, **kwargs)


def step_axis(axes: Axes) -> None:
    axes.set_xlabel("training step")
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.xaxis.set_major_formatter(lambda step, _: f"{step:,.0f}")


def percent_axis(axes: Axes, label: str, top: float) -> None:
    axes.set_ylim(0, top)
    axes.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes.set_ylabel(label)


def ramp(num: int, colors: LinearSegmentedColormap) -> list[str]:
    return [to_hex(colors(i / max(num - 1, 1))) for i in range(num)]


def _style() -> dict[Any, Any]:
    installed = {font.name for font in fontManager.ttflist}
    return {
        "font.family": next(name for name in FONTS if name in installed),
        "font.size": 9.5,
        "text.color": INK,
        "axes.edgecolor": MUTED,
        "axes.labelcolor": MUTED,
        "axes.linewidth": 0.8,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.spines.left": False,
        "axes.grid": True,
        "axes.grid.axis": "y",
        "axes.axisbelow": True,
        "axes.xmargin": 0.015,
        "grid.color": RULE,
        "grid.linewidth": 0.8,
        "lines.linewidth": 1.6,
        "lines.solid_capstyle": "round",
        "xtick.color": MUTED,
        "ytick.color": MUTED,
        "ytick.left": False,
        "legend.fontsize": 9.5,
    }
