"""The report's plots of drift: where the drafter attends, and the state that it feeds back."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from train.report.plots import (
    ACCENT,
    PALE,
    WARNING,
    Panel,
    draw_curves,
    legend_above,
    percent_axis,
    step_axis,
)

# The kinds of keys in a record, their names on the page, and their colors.
_KEYS = (
    ("sink", "sink", ACCENT),
    ("context", "rest of the context", PALE),
    ("own", "drafter's own tokens", WARNING),
)


def shown_drift(metrics: Sequence[dict[str, Any]], best_step: int | None) -> dict[str, Any] | None:
    """Return the record of drift nearest to the exported step, or the last one; None without records."""
    records = [record for record in metrics if record["kind"] == "drift"]
    if best_step is None or not records:
        return records[-1] if records else None
    return min(records, key=lambda record: abs(record["step"] - best_step))


def drift_tables(record: dict[str, Any] | None) -> list[list[list[str]]]:
    """Return tables by token of the draft and by captured layer, each with a header."""
    if record is None:
        return []
    tokens = [["token", *(name for _, name, _ in _KEYS), "RMS of the state fed back", "accepted"]]
    for number, depth in enumerate(record["depth"], start=1):
        shares = [f"{100 * depth['layers'][-1][key]:.1f} %" for key, _, _ in _KEYS]
        reached = depth["num_reached"]
        accepted = f"{100 * depth['conditional_acceptance']:.0f} % of {reached}" if reached else ""
        tokens.append([str(number), *shares, f"{depth['state_rms']:.2f}", accepted])
    normed = "normed_rms" in record["captured"][0]
    layers = [["aux layer id", "RMS", *(["RMS after fc_norm"] if normed else []), "share of the fused input"]]
    for one in record["captured"]:
        sizes = [f"{one[name]:.2f}" for name in ("rms", "normed_rms") if name in one]
        layers.append([str(one["aux_layer_id"]), *sizes, f"{100 * one['share']:.1f} %"])
    return [tokens, layers]


def drift_panels(metrics: Sequence[dict[str, Any]], best_step: int | None) -> dict[str, Panel]:
    """Return the panels on drift by name; none for metrics without records of drift."""
    shown = shown_drift(metrics, best_step)
    if shown is None:
        return {}
    records = [record for record in metrics if record["kind"] == "drift"]
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


def _draw_heads(axes: Axes, record: dict[str, Any]) -> None:
    layers = [depth["layers"][-1] for depth in record["depth"]]
    tokens = np.arange(1, len(layers) + 1)
    for key, name, color in (_KEYS[0], _KEYS[2]):
        heads = np.array([layer["heads"][key] for layer in layers])  # shape: [steps, heads]
        axes.plot(tokens, heads, color=color, linewidth=0.7, alpha=0.45)
        axes.plot(tokens, heads.mean(1), color=color, linewidth=2.2, marker="o", markersize=4, label=name)
    axes.set(xticks=tokens, xlabel="token of the draft")
    percent_axis(axes, "of a head's attention", top=1.18)
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


def _draw_shares(axes: Axes, records: Sequence[dict[str, Any]]) -> None:
    steps = [record["step"] for record in records]
    curves = [
        (f"layer {one['aux_layer_id']}", steps, [record["captured"][index]["share"] for record in records])
        for index, one in enumerate(records[-1]["captured"])
    ]
    percent_axis(axes, "of the fused input", top=1.0)
    step_axis(axes)
    draw_curves(axes, curves, markersize=3)
