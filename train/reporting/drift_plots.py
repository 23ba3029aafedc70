"""The report's part on drift: its plots, and the numbers of its tables."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from train.reporting.colors import COLORS
from train.reporting.plots import ACCENT, LIGHT_RAMP, PALE, Panel, label_ends, percent_axis, ramp, step_axis

WARNING = COLORS["warning"][0]
# The names of the kinds of keys in a record and on the page, and their colors.
KEY_KINDS = (
    ("sink", "sink", ACCENT),
    ("context", "rest of the context", PALE),
    ("own", "drafter's own tokens", WARNING),
)


def shown_drift(metrics: Sequence[dict[str, Any]], best_step: int | None) -> dict[str, Any] | None:
    """Return the record of drift nearest to the exported step, or the last one; None without records."""
    records = _records(metrics)
    if not records:
        return None
    if best_step is None:
        return records[-1]
    return min(records, key=lambda record: abs(record["step"] - best_step))


def drift_panels(metrics: Sequence[dict[str, Any]], best_step: int | None = None) -> dict[str, Panel]:
    """Return the panels on drift by name; none for metrics without records of drift."""
    records, shown = _records(metrics), shown_drift(metrics, best_step)
    if shown is None:
        return {}
    where = f"last layer, step {shown['step']:,}"
    panels = (
        Panel(
            "drift_attention",
            "Where the drafter attends",
            f"mean over heads, {where}",
            lambda axes: _draw_attention(axes, shown),
        ),
        Panel(
            "drift_heads",
            "Attention by head",
            f"a thin line for each head, {where}",
            lambda axes: _draw_heads(axes, shown),
        ),
        Panel(
            "drift_state",
            "Size of the state that is fed back",
            "root mean square by token of the draft",
            lambda axes: _draw_states(axes, records),
        ),
        Panel(
            "drift_share",
            "Share of the captured layers",
            "norm of each layer's part of the fused input over the sum of these norms",
            lambda axes: _draw_shares(axes, records),
        ),
    )
    return {panel.name: panel for panel in panels}


def _records(metrics: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [record for record in metrics if record["kind"] == "drift"]


def _last_layers(record: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the attention of the last layer at each step."""
    return [depth["layers"][-1] for depth in record["depth"]]


def _draw_attention(axes: Axes, record: dict[str, Any]) -> None:
    layers = _last_layers(record)
    tokens = np.arange(1, len(layers) + 1)
    bottom = np.zeros(len(layers))
    for key, name, color in KEY_KINDS:
        heights = np.array([layer[key] for layer in layers])
        axes.bar(tokens, heights, 0.72, bottom=bottom, color=color, label=name)
        bottom += heights
    axes.set(xticks=tokens, xlabel="token of the draft")
    percent_axis(axes, "of the attention", top=1.18)
    axes.set_yticks(np.linspace(0, 1, 6))
    _legend(axes, 3)


def _draw_heads(axes: Axes, record: dict[str, Any]) -> None:
    layers = _last_layers(record)
    tokens = np.arange(1, len(layers) + 1)
    for key, name, color in (KEY_KINDS[0], KEY_KINDS[2]):
        heads = np.array([layer["heads"][key] for layer in layers])  # shape: [steps, heads]
        axes.plot(tokens, heads, color=color, linewidth=0.7, alpha=0.45)
        axes.plot(tokens, heads.mean(1), color=color, linewidth=2.2, marker="o", markersize=4, label=name)
    axes.set(xticks=tokens, xlabel="token of the draft")
    percent_axis(axes, "of a head's attention", top=1.18)
    axes.set_yticks(np.linspace(0, 1, 6))
    _legend(axes, 2)


def _draw_states(axes: Axes, records: Sequence[dict[str, Any]]) -> None:
    num_depths = max(len(record["depth"]) for record in records)
    labels = []
    for depth, color in enumerate(ramp(num_depths, LIGHT_RAMP)):
        found = [record for record in records if depth < len(record["depth"])]
        x, y = [r["step"] for r in found], [r["depth"][depth]["state_rms"] for r in found]
        axes.plot(x, y, color=color, marker="o", markersize=3)
        labels.append((f"token {depth + 1}", x[-1], y[-1], color))
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_locator(MaxNLocator(6))
    axes.set_ylabel("RMS")
    step_axis(axes)
    label_ends(axes, labels)


def _draw_shares(axes: Axes, records: Sequence[dict[str, Any]]) -> None:
    steps = [record["step"] for record in records]
    ids = [one["aux_layer_id"] for one in records[-1]["captured"]]
    labels = []
    for index, (layer, color) in enumerate(zip(ids, ramp(len(ids), LIGHT_RAMP), strict=True)):
        shares = [record["captured"][index]["share"] for record in records]
        axes.plot(steps, shares, color=color, marker="o", markersize=3)
        labels.append((f"layer {layer}", steps[-1], shares[-1], color))
    percent_axis(axes, "of the fused input", top=1.0)
    step_axis(axes)
    label_ends(axes, labels)


def _legend(axes: Axes, num_columns: int) -> None:
    axes.legend(
        loc="upper left",
        ncols=num_columns,
        frameon=False,
        borderpad=0,
        handlelength=0.9,
        columnspacing=1.2,
        borderaxespad=0,
    )
