"""The plots of a run: panels that draw on one pair of axes each, and their output as PNG and SVG."""

import base64
import io
import math
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
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator, PercentFormatter

# Blue, orange and gray differ for every kind of color vision. templates/style.css has the same colors.
INK, MUTED, RULE, ACCENT, PALE, WARNING = "#1c2127", "#5c6570", "#dfe3e8", "#0f62a8", "#a9c4dd", "#b4490a"
# Ordered like the depths: the first draft token has the most contrast.
_RAMP = LinearSegmentedColormap.from_list("ramp", ["#14284f", "#20739f", "#62b492"])
_STYLE: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.sans-serif": ["Inter", "Helvetica Neue", "Helvetica", "Arial", "Liberation Sans", "DejaVu Sans"],
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
    "legend.frameon": False,
    "legend.fontsize": 9.5,
    "lines.linewidth": 1.6,
    "lines.solid_capstyle": "round",
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "ytick.left": False,
}
# The kinds of keys in a record of drift, their names on the page, and their colors.
_KEYS = (
    ("sink", "sink", ACCENT),
    ("context", "rest of the context", PALE),
    ("own", "drafter's own tokens", WARNING),
)
_HEIGHT_INCHES = 3.1
_DOTTED = (0, (1, 2.5))
_NUM_BINS = 80  # points per training curve: enough for its shape without the noise


@dataclass(frozen=True)
class Panel:
    """One plot."""

    name: str
    title: str
    note: str  # the conditions of the numbers
    draw: Callable[[Axes], None]


def save_png(panels: Sequence[Panel], path: Path, headline: str = "", panel_inches: float = 4.6) -> None:
    """Draw panels next to each other with titles and conditions, under an optional headline."""
    notes = [textwrap.wrap(panel.note, int(panel_inches * 13)) for panel in panels]
    num_lines = max(map(len, notes))  # as many for all, so that the titles are aligned
    with matplotlib.rc_context(_STYLE):
        size = (panel_inches * len(panels), _HEIGHT_INCHES + 0.6 + 0.3 * bool(headline))
        figure = Figure(figsize=size, layout=ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1, wspace=0.04))
        if headline:
            figure.suptitle(headline, x=0.012, ha="left", fontsize=13.5, fontweight="bold")
        [row] = figure.subplots(1, len(panels), squeeze=False)
        for axes, panel, note in zip(row, panels, notes, strict=True):
            panel.draw(axes)
            lines = "\n".join(note + [""] * (num_lines - len(note)))
            axes.set_title(lines, loc="left", fontsize=9, color=MUTED, pad=9)
            above = (0, 11.5 * num_lines + 11)
            _label(axes, panel.title, (0, 1), above, INK, fontsize=11.5, fontweight="bold", fraction=True)
        partial = path.with_name(f".{path.name}.partial")
        figure.savefig(partial, dpi=180, facecolor="white", format="png")
        partial.replace(path)


def svg_uri(panel: Panel) -> str:
    """Return the panel without its title as an SVG image in a data URI."""
    buffer = io.BytesIO()
    with matplotlib.rc_context(_STYLE | {"svg.fonttype": "none", "svg.hashsalt": panel.name}):
        figure = Figure(figsize=(4.9, _HEIGHT_INCHES), layout="constrained")
        panel.draw(figure.subplots())
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    return f"data:image/svg+xml;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def run_panels(
    metrics: Sequence[dict[str, Any]], evaluation: dict[str, Any], best_step: int | None = None
) -> dict[str, Panel]:
    """Return the panels on training and acceptance that there is data for, by name.

    Args:
        metrics: the lines of metrics.jsonl.
        evaluation: the evaluation's results; may be empty.
        best_step: the step whose weights were exported.
    """
    train = [record for record in metrics if record["kind"] == "train" and record.get("depth")]
    validation = [record for record in metrics if record["kind"] == "validation"]
    found: list[Panel] = []
    if train:
        note = "cross-entropy by token of the draft"
        found.append(Panel("loss", "Training loss", note, lambda axes: _draw_loss(axes, train)))
    if validation:
        note = "temperature 0, by replay of held-out prompts"
        draw = lambda axes: _draw_replay(axes, validation, best_step)  # noqa: E731
        found.append(Panel("replay", "Acceptance length over training", note, draw))
    if evaluation:
        trained = evaluation["trained"]["by_draft_length"]
        untrained = (evaluation.get("untrained") or {}).get("by_draft_length", [])
        note = f"temperature 0, by replay of {evaluation['num_prompts']} held-out prompts"
        draw = lambda axes: _draw_draft_length(axes, trained, untrained)  # noqa: E731
        shaded = f"{note}; shaded: 95 % interval over prompts"
        found.append(Panel("draft_length", "Acceptance length by draft length", shaded, draw))
        stats = trained[evaluation["k"] - 1]
        draw = lambda axes: _draw_positions(axes, stats)  # noqa: E731
        note = f"k = {stats['k']}, {note}"
        found.append(Panel("positions", "Acceptance by position in the draft", note, draw))
    if (shown := shown_drift(metrics, best_step)) is not None:
        note = f"mean over heads, last layer, step {shown['step']:,}"
        draw = lambda axes: _draw_attention(axes, shown)  # noqa: E731
        found.append(Panel("drift_attention", "Where the drafter attends", note, draw))
        records = [record for record in metrics if record["kind"] == "drift"]
        note = "root mean square by token of the draft"
        draw = lambda axes: _draw_states(axes, records)  # noqa: E731
        found.append(Panel("drift_state", "Size of the state that is fed back", note, draw))
    return {panel.name: panel for panel in found}


def shown_drift(metrics: Sequence[dict[str, Any]], best_step: int | None) -> dict[str, Any] | None:
    """Return the record of drift nearest to the exported step, or the last one; None without records."""
    records = [record for record in metrics if record["kind"] == "drift"]
    if best_step is None or not records:
        return records[-1] if records else None
    return min(records, key=lambda record: abs(record["step"] - best_step))


def _draw_loss(axes: Axes, train: Sequence[dict[str, Any]]) -> None:
    num_depths = max(len(record["depth"]) for record in train)
    curves = []
    for depth in range(num_depths):
        records = [record for record in train if depth < len(record["depth"])]
        points = _bin_means([r["step"] for r in records], [r["depth"][depth]["loss"] for r in records])
        curves.append((f"token {depth + 1}", *points))
    axes.set_ylabel("nats per token")
    step_axis(axes)
    draw_curves(axes, curves, markersize=0 if len(curves[0][1]) > 1 else 4)


def _draw_replay(axes: Axes, validation: Sequence[dict[str, Any]], best_step: int | None) -> None:
    curves = []
    for k in sorted({int(k) for record in validation for k in record["acceptance_length"]}, reverse=True):
        records = [record for record in validation if str(k) in record["acceptance_length"]]
        y = [record["acceptance_length"][str(k)] for record in records]
        curves.append((f"k = {k}", [record["step"] for record in records], y))
    axes.set_ylabel("tokens per target forward")
    if best_step is not None:
        axes.axvline(best_step, color=MUTED, linewidth=1, linestyle=_DOTTED, zorder=1)
        _label(axes, f"best: {best_step:,}", (best_step, 0), (-4, 4), MUTED, ha="right", at_bottom=True)
    step_axis(axes)
    draw_curves(axes, curves, bottom=0.95)


def _draw_draft_length(
    axes: Axes, trained_rows: Sequence[dict[str, Any]], untrained_rows: Sequence[dict[str, Any]]
) -> None:
    k = [row["k"] for row in trained_rows]
    trained = [row["acceptance_length"] for row in trained_rows]
    # The perfect line leaves the axes where drafts are long and few of their tokens are accepted.
    top = min(k[-1] + 1.35, 1.3 * max(row["high"] for row in trained_rows))
    axes.set(xlim=(k[0] - 0.3, k[-1] + 0.3), ylim=(0.75, top), xticks=k)
    axes.set(xlabel="draft length k (tokens)", ylabel="tokens per target forward")
    axes.plot(k, [n + 1 for n in k], color=MUTED, linewidth=1, linestyle=_DOTTED)
    labels = [("trained", trained[-1], ACCENT)]
    if k[-1] + 1 < top:
        labels.append(("perfect", k[-1] + 1, MUTED))
    else:
        _label(axes, "perfect", (top - 1, top), (5, -12), MUTED)
    if untrained_rows:
        untrained = [row["acceptance_length"] for row in untrained_rows]
        axes.plot(k, untrained, color=MUTED, marker="o", markersize=4)
        labels.append(("untrained", untrained[-1], MUTED))
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
    legend_above(axes)


def _draw_attention(axes: Axes, record: dict[str, Any]) -> None:
    layers = [depth["layers"][-1] for depth in record["depth"]]
    tokens, bottom = np.arange(1, len(layers) + 1), np.zeros(len(layers))
    for key, name, color in _KEYS:
        heights = np.array([layer[key] for layer in layers])
        axes.bar(tokens, heights, 0.72, bottom=bottom, color=color, label=name)
        bottom += heights
    axes.set(xticks=tokens, xlabel="token of the draft")
    percent_axis(axes, "of the attention", top=1.18)
    legend_above(axes)


def _draw_states(axes: Axes, records: Sequence[dict[str, Any]]) -> None:
    steps = [record["step"] for record in records]
    curves = [
        (f"token {depth + 1}", steps, [record["depth"][depth]["state_rms"] for record in records])
        for depth in range(len(records[0]["depth"]))
    ]
    axes.set_ylabel("RMS")
    step_axis(axes)
    draw_curves(axes, curves, markersize=3, bottom=0)


def draw_curves(
    axes: Axes,
    curves: Sequence[tuple[str, Sequence[float], Sequence[float]]],
    markersize: float = 3.5,
    bottom: float | None = None,
) -> None:
    """Draw (name, x, y) curves in the colors of the ramp, with their names at their ends."""
    colors = ramp(len(curves))
    for (_, x, y), color in zip(curves, colors, strict=True):
        axes.plot(x, y, color=color, marker="o" if markersize else "", markersize=markersize)
    if bottom is not None:
        axes.set_ylim(bottom=bottom)
    label_ends(axes, [(name, y[-1], color) for (name, _, y), color in zip(curves, colors, strict=True)])


def label_ends(axes: Axes, labels: Sequence[tuple[str, float, str]]) -> None:
    """Label each (text, y, color) curve to the right of its end; move labels apart that would overlap."""
    shown = sorted((label for label in labels if math.isfinite(label[1])), key=lambda label: label[1])
    bottom, top = axes.get_ylim()
    gap = 0.062 * (top - bottom)
    heights: list[float] = []
    for _, y, _ in shown:
        heights.append(max(y, heights[-1] + gap) if heights else y)
    # All labels move down by the mean of the shifts, so that they stay next to their curves.
    shift = sum(heights) / max(len(shown), 1) - sum(y for _, y, _ in shown) / max(len(shown), 1)
    right = axes.get_xlim()[1]
    for height, (text, _, color) in zip(heights, shown, strict=True):
        _label(axes, text, (right, height - shift), (5, 0), color, va="center")


def step_axis(axes: Axes) -> None:
    axes.set_xlabel("training step")
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.xaxis.set_major_formatter(lambda step, _: f"{step:,.0f}")


def percent_axis(axes: Axes, label: str, top: float) -> None:
    axes.set_ylim(0, top)
    axes.set_yticks(np.arange(0, min(top, 1) + 0.01, 0.1 if top <= 0.5 else 0.2))
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes.set_ylabel(label)


def legend_above(axes: Axes) -> None:
    """Name what is drawn in one row at the top, where `percent_axis` has left room."""
    axes.legend(loc="upper left", ncols=4, borderpad=0, handlelength=0.9, columnspacing=1.2, borderaxespad=0)


def ramp(num: int) -> list[str]:
    return [to_hex(_RAMP(i / max(num - 1, 1))) for i in range(num)]


def _bin_means(steps: Sequence[float], values: Sequence[float]) -> tuple[list[float], list[float]]:
    """Return means over at most _NUM_BINS runs of neighbouring points. [N] -> [M], [M]."""
    size = -(-len(steps) // _NUM_BINS)
    starts = np.arange(0, len(steps), size)
    counts = np.diff([*starts, len(steps)])
    x, y = (np.add.reduceat(np.asarray(series, dtype=float), starts) / counts for series in (steps, values))
    return x.tolist(), y.tolist()


def _label(
    axes: Axes,
    text: str,
    xy: tuple[float, float],
    offset: tuple[float, float],
    color: str,
    *,
    fraction: bool = False,
    at_bottom: bool = False,
    **kwargs: Any,
) -> None:
    """Write text `offset` points away from a data point, or from a fraction of the axes (or their height)."""
    where = "axes fraction" if fraction else ("data", "axes fraction") if at_bottom else "data"
    axes.annotate(text, xy, offset, where, "offset points", color=color, annotation_clip=False, **kwargs)
