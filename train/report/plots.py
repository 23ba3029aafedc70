"""The plots of a run: panels that draw on one pair of axes each, and their output as PNG and SVG."""

import base64
import io
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
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
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": RULE,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
}
# The kinds of keys in a record of drift, their names on the page, and their colors.
_KEYS = (
    ("sink", "sink", ACCENT),
    ("context", "rest of the context", PALE),
    ("own", "drafter's own tokens", WARNING),
)
_HEIGHT_INCHES = 3.1
_NUM_LABELS = 8
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
    with matplotlib.rc_context(_STYLE):
        figure = Figure((panel_inches * len(panels), _HEIGHT_INCHES + 1), layout="constrained")
        figure.suptitle(headline, x=0.012, ha="left", fontsize=13.5, fontweight="bold")
        [row] = figure.subplots(1, len(panels), squeeze=False)
        for axes, panel in zip(row, panels, strict=True):
            panel.draw(axes)
            lines = [panel.title, *textwrap.wrap(panel.note, int(panel_inches * 9))]
            axes.set_title("\n".join(lines), loc="left", fontsize=9)
        written = path.with_name(f".{path.name}.partial")
        figure.savefig(written, dpi=180, facecolor="white", format="png")
        written.replace(path)


def svg_uri(panel: Panel) -> str:
    """Return the panel without its title as an SVG image in a data URI."""
    buffer = io.BytesIO()
    with matplotlib.rc_context(_STYLE | {"svg.fonttype": "none", "svg.hashsalt": panel.name}):
        figure = Figure(figsize=(4.9, _HEIGHT_INCHES), layout="constrained")
        panel.draw(figure.subplots())
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    return f"data:image/svg+xml;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def run_panels(
    metrics: Sequence[dict[str, Any]], evaluation: dict[str, Any], best_step: int
) -> dict[str, Panel]:
    """Return the panels on training and acceptance that there is data for, by name.

    Args:
        metrics: the lines of metrics.jsonl.
        evaluation: the evaluation's results.
        best_step: the step whose weights were exported.
    """
    found: list[Panel] = []

    def add(name: str, title: str, note: str, draw: Callable[..., None], *drawn: Any) -> None:
        found.append(Panel(name, title, note, lambda axes: draw(axes, *drawn)))

    of_kind = {
        kind: [one for one in metrics if one["kind"] == kind] for kind in ("train", "validation", "drift")
    }
    if train := [record for record in of_kind["train"] if record.get("depth")]:
        add("loss", "Training loss", "cross-entropy by token of the draft", _draw_loss, train)
    if validation := of_kind["validation"]:
        note = "temperature 0, by replay of held-out prompts"
        add("replay", "Acceptance length over training", note, _draw_replay, validation, best_step)
    trained, untrained = (evaluation[name]["by_draft_length"] for name in ("trained", "untrained"))
    note = f"temperature 0, by replay of {evaluation['num_prompts']} held-out prompts"
    shaded = f"{note}; shaded: 95 % interval over prompts"
    title = "Acceptance length by draft length"
    mtp = (evaluation.get("mtp") or {}).get("by_draft_length", [])
    add("draft_length", title, shaded, _draw_draft_length, trained, untrained, mtp)
    stats = trained[evaluation["k"] - 1]
    note = f"k = {stats['k']}, {note}"
    add("positions", "Acceptance by position in the draft", note, _draw_positions, stats)
    if (shown := shown_drift(metrics, best_step)) is not None:
        note = f"mean over heads, last layer, step {shown['step']:,}"
        add("drift_attention", "Where the drafter attends", note, _draw_attention, shown)
        title, note = "Size of the state that is fed back", "root mean square by token of the draft"
        add("drift_state", title, note, _draw_states, of_kind["drift"])
    return {panel.name: panel for panel in found}


def shown_drift(metrics: Sequence[dict[str, Any]], best_step: int) -> dict[str, Any] | None:
    """Return the record of drift nearest to the exported step; None without records."""
    records = [record for record in metrics if record["kind"] == "drift"]
    return min(records, key=lambda record: abs(record["step"] - best_step), default=None)


def _draw_loss(axes: Axes, train: Sequence[dict[str, Any]]) -> None:
    curves = []
    for depth in range(max(len(record["depth"]) for record in train)):
        records = [record for record in train if depth < len(record["depth"])]
        points = np.array([(record["step"], record["depth"][depth]["loss"]) for record in records])
        # Means of neighbouring points.
        means = [part.mean(axis=0) for part in np.array_split(points, min(len(points), _NUM_BINS))]
        x, y = np.transpose(means).tolist()
        curves.append((f"token {depth + 1}", x, y))
    _draw_curves(axes, curves, "nats per token", markersize=0 if len(curves[0][1]) > 1 else 4)


def _draw_replay(axes: Axes, validation: Sequence[dict[str, Any]], best_step: int) -> None:
    curves = []
    for k in sorted({int(k) for record in validation for k in record["acceptance_length"]}, reverse=True):
        records = [record for record in validation if str(k) in record["acceptance_length"]]
        y = [record["acceptance_length"][str(k)] for record in records]
        curves.append((f"k = {k}", [record["step"] for record in records], y))
    axes.axvline(best_step, color=MUTED, linewidth=1, linestyle=":", label=f"best: {best_step:,}")
    _draw_curves(axes, curves, "tokens per target forward", bottom=0.95)


def _draw_draft_length(
    axes: Axes,
    trained_rows: Sequence[dict[str, Any]],
    untrained_rows: Sequence[dict[str, Any]],
    mtp_rows: Sequence[dict[str, Any]],
) -> None:
    k = [row["k"] for row in trained_rows]
    trained, low, high = (  # bounds that are unknown are NaN
        np.array([row[name] for row in trained_rows], float) for name in ("acceptance_length", "low", "high")
    )
    # The perfect line leaves the axes where drafts are long and few of their tokens are accepted.
    every = slice(None, None, _labelled(len(k)))
    axes.set(ylim=(0.75, min(k[-1] + 1.35, 1.3 * np.nanmax([trained, high]))), xticks=k[every])
    axes.set(xlabel="draft length k (tokens)", ylabel="tokens per target forward")
    axes.plot(k, [n + 1 for n in k], color=MUTED, linewidth=1, linestyle=":", label="perfect")
    axes.fill_between(k, low, high, color=PALE, linewidth=0, zorder=1)
    axes.plot(k, trained, color=ACCENT, marker="o", label="trained")
    untrained = [row["acceptance_length"] for row in untrained_rows]
    axes.plot(k, untrained, color=MUTED, marker="o", markersize=4, label="untrained")
    for row in mtp_rows:  # one, at the length at which it was decoded
        axes.plot(row["k"], row["acceptance_length"], color=WARNING, marker="D", label="target's MTP head")
    for n, value in zip(k[every], trained[every], strict=True):
        axes.annotate(
            f"{value:.2f}", (n, value), (0, -15), textcoords="offset points", ha="center", color=ACCENT
        )
    _legend_next_to(axes)


def _draw_positions(axes: Axes, stats: dict[str, Any]) -> None:
    bars = (
        ("of all drafts", stats["absolute_acceptance"], ACCENT, -0.205),
        ("of drafts accepted so far", stats["conditional_acceptance"], PALE, 0.205),
    )
    positions, every = np.arange(1, stats["k"] + 1), _labelled(stats["k"])
    for name, rates, color, offset in bars:
        drawn = axes.bar(positions + offset, rates, 0.39, color=color, label=name)
        if every == 1 or offset < 0:  # narrow bars have room for one of two labels
            labels = [f"{100 * rate:.0f}" if index % every == 0 else "" for index, rate in enumerate(rates)]
            axes.bar_label(drawn, labels, padding=2)
    axes.set(xticks=positions[::every], xlabel="position in the draft")
    _percent_axis(axes, "accepted")


def _draw_attention(axes: Axes, record: dict[str, Any]) -> None:
    layers = [depth["layers"][-1] for depth in record["depth"]]
    tokens, bottom = np.arange(1, len(layers) + 1), np.zeros(len(layers))
    for key, name, color in _KEYS:
        heights = np.array([layer[key] for layer in layers])
        axes.bar(tokens, heights, 0.72, bottom=bottom, color=color, label=name)
        bottom += heights
    axes.set(xticks=tokens, xlabel="token of the draft")
    _percent_axis(axes, "of the attention")


def _draw_states(axes: Axes, records: Sequence[dict[str, Any]]) -> None:
    steps = [record["step"] for record in records]
    curves = [
        (f"token {depth + 1}", steps, [record["depth"][depth]["state_rms"] for record in records])
        for depth in range(len(records[0]["depth"]))
    ]
    _draw_curves(axes, curves, "RMS", bottom=0)


def _draw_curves(
    axes: Axes,
    curves: Sequence[tuple[str, Sequence[float], Sequence[float]]],
    label: str,
    markersize: float = 3.5,
    bottom: float | None = None,
) -> None:
    """Draw (name, x, y) curves over training's steps in the colors of the ramp."""
    for index, (name, x, y) in enumerate(curves):
        color = _RAMP(index / max(len(curves) - 1, 1))
        axes.plot(x, y, color=color, marker="o" if markersize else "", markersize=markersize, label=name)
    axes.set(xlabel="training step", ylabel=label)
    axes.set_ylim(bottom=bottom)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.xaxis.set_major_formatter(lambda step, _: f"{step:,.0f}")
    _legend_next_to(axes)


def _labelled(number: int) -> int:
    """Return every how many of the points have a label, so that labels do not overlap."""
    return -(-number // _NUM_LABELS)


def _legend_next_to(axes: Axes) -> None:
    """Add the legend to the right of the axes, where it covers no curve."""
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))


def _percent_axis(axes: Axes, label: str) -> None:
    """Make the y axis one of percentages, with room for the legend above."""
    axes.set(ylim=(0, 1.2), yticks=np.linspace(0, 1, 6), ylabel=label)
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes.legend(loc="upper left", ncols=3)
