"""The report of step benchmarks: a table for the terminal, and two pictures."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from train.bench.step.shapes import Shape
from train.bench.step.timing import like_for_like
from train.reporting.plots import ACCENT, INK, MUTED, PALE, Panel, save_png
from train.tables import aligned

MEGABYTE = 1e6
_CLOCKS = {"cpu": "CPU second", "wall": "second"}


def shape_lines(measured: dict[str, Any], settings_line: str) -> list[str]:
    """Return the table of one shape, the ratios to the peers, and the FLOPs."""
    shape = Shape(**measured["shape"])
    rows = measured["rows"]
    supervised = np.mean([row["rows"][0] / row["num_tokens"] for row in rows])
    lines = [
        f"{shape.name}  {shape.describe()}",
        f"   {len(rows)} packed row(s) of {shape.row_tokens:,} tokens, {100 * supervised:.0f} % of them "
        f"supervised; {measured['content']}; {settings_line}",
        "",
    ]
    table = [["side", "head", "trained", "tokens/s", "CPU s/step", "step MB", "baseline MB"]]
    for side in measured["sides"]:
        name = side["side"] if side["side"] == "eagle31" else f"{side['side']} {side.get('version', '')}"
        if "tokens_per_second" in side:
            memory = side["memory"]
            cells = [
                f"{side['num_trained'] / 1e6:,.1f} M",
                f"{side['tokens_per_second']:,.0f}",
                f"{side['cpu_seconds_per_step']:.2f}",
                f"{memory['step_bytes'] / MEGABYTE:,.0f}",
                f"{memory['baseline_bytes'] / MEGABYTE:,.0f}",
            ]
        else:
            cells = ["", "failed", "", "", ""]
        table.append([name, side["head"], *cells])
    lines += aligned(table, text_columns=2)
    lines += [
        f"{side['side']}: {side[key]}"
        for side in measured["sides"]
        for key in ("ran", "error")
        if key in side
    ]
    lines.append("")
    for one in like_for_like(measured):
        lines.append(
            f"against {one['peer']}, head {one['head']} on both sides: {one['speed']:.2f}x the tokens per "
            f"second ({one['cpu_speed']:.2f}x per CPU second), {one['memory']:.2f} of its step's memory "
            f"({one['whole_memory']:.2f} with the baseline)"
        )
    for side in measured["sides"]:
        if "flops" in side:
            lines.append(
                f"eagle31, head {side['head']}: {side['flops']['total'] / 1e9:,.0f} GFLOP a step, "
                f"{100 * side['fraction_of_peak']:.0f} % of the measured GEMM peak of "
                f"{side['peak_flops'] / 1e9:,.0f} GFLOP per {_CLOCKS[side['clock']]}"
            )
    return lines


def plot_sides(results: Sequence[dict[str, Any]], path: Path, condition: str) -> None:
    """Plot tokens per second and peak memory of every side by shape."""
    panels = [
        Panel(
            "speed",
            "Training speed",
            f"packed tokens per second, logarithmic; {condition}",
            lambda axes: _draw_sides(
                axes, results, lambda s: s["tokens_per_second"], lambda v: f"{v:,.0f}", "tokens per second"
            ),
        ),
        Panel(
            "memory",
            "Peak memory of a step",
            "above weights, inputs and libraries, logarithmic",
            lambda axes: _draw_sides(
                axes, results, lambda s: s["memory"]["step_bytes"] / MEGABYTE, _megabytes, "MB"
            ),
        ),
    ]
    save_png(panels, path, panel_inches=6.2)


def _draw_sides(axes: Axes, results: Sequence[dict[str, Any]], value: Any, text: Any, unit: str) -> None:
    """Draw a bar per side from the axis to its value, grouped by shape."""
    y, ticks, labels = 0.0, [], []
    values: list[float] = []
    for measured in results:
        shown = [side for side in measured["sides"] if "tokens_per_second" in side]
        axes.annotate(
            f"{measured['shape']['name']}  {_short(measured)}",
            (0, y),
            (0, 0),
            ("axes fraction", "data"),
            "offset points",
            color=INK,
            fontweight="bold",
            va="center",
        )
        y += 1
        for side in shown:
            ours = side["side"] == "eagle31"
            number = value(side)
            color = ACCENT if ours else MUTED
            axes.plot([1e-9, number], [y, y], color=ACCENT if ours else PALE, linewidth=5)
            axes.annotate(
                text(number), (number, y), (5, 0), "data", "offset points", color=color, va="center"
            )
            ticks.append(y)
            labels.append(f"{side['side']}, head {side['head']}")
            values.append(number)
            y += 1
        y += 0.5
    axes.set_xscale("log")
    axes.set_xlim(min(values) / 3, max(values) * 4)
    axes.set_ylim(y - 0.5, -0.8)
    axes.set_yticks(ticks, labels)
    axes.grid(False)
    axes.xaxis.set_major_formatter(lambda number, _: f"{number:,.0f}")
    axes.set_xlabel(unit)


def _short(measured: dict[str, Any]) -> str:
    contents = {
        "chat": "chat, packed to {n:,}",
        "long prompt": "prompt of {p:,}, answer of 256",
        "answers only": "every token supervised, {n:,}",
    }
    tokens = measured["shape"]["row_tokens"]
    return contents[measured["shape"]["content"]].format(n=tokens, p=tokens - 256)


def _megabytes(value: float) -> str:
    return f"{value / 1000:.1f} GB" if value >= 1000 else f"{value:.0f} MB"


def plot_memory(by_length: Sequence[dict[str, Any]], by_size: Sequence[dict[str, Any]], path: Path) -> None:
    """Plot peak memory over row length with a linear fit, and over vocabulary and steps.

    Args:
        by_length: `row_tokens`, `hidden_size`, `num_steps`, `vocab_size`, `step_bytes`; ascending.
        by_size: the same, all at one row length.
    """
    first, size = by_length[0], by_size[0]
    panels = [
        Panel(
            "length",
            "Peak memory over row length",
            f"one document per row, half of it the assistant's; hidden size {first['hidden_size']}, "
            f"{first['num_steps']} steps, vocabulary {_thousands(first['vocab_size'])}",
            lambda axes: _draw_lengths(axes, by_length),
        ),
        Panel(
            "size",
            "Peak memory over vocabulary and steps",
            f"rows of {size['row_tokens']:,} tokens, a quarter of the vocabulary drafted; "
            f"hidden size {size['hidden_size']}",
            lambda axes: _draw_sizes(axes, by_size),
        ),
    ]
    save_png(panels, path, panel_inches=5.2)


def fit_line(points: Sequence[dict[str, Any]]) -> tuple[float, float, float]:
    """Return bytes per token, bytes at zero tokens, and the largest relative deviation of a point."""
    x = np.array([p["row_tokens"] for p in points], dtype=float)
    y = np.array([p["step_bytes"] for p in points], dtype=float)
    slope, intercept = np.polyfit(x, y, 1, w=1 / y)
    return float(slope), float(intercept), float(np.abs((slope * x + intercept) / y - 1).max())


def _draw_lengths(axes: Axes, points: Sequence[dict[str, Any]]) -> None:
    slope, intercept, _ = fit_line(points)
    x = [p["row_tokens"] for p in points]
    axes.plot([0, x[-1]], [intercept / 1e9, (intercept + slope * x[-1]) / 1e9], color=PALE, linewidth=2.2)
    axes.plot(x, [p["step_bytes"] / 1e9 for p in points], "o", color=ACCENT, markersize=6)
    middle = (x[-1] * 0.5, (intercept + slope * x[-1] * 0.5) / 1e9)
    axes.annotate(f"{slope / 1000:.0f} kB per token", middle, (8, -14), "data", "offset points", color=INK)
    axes.set_xlim(0, x[-1] * 1.04)
    axes.set_ylim(bottom=0)
    axes.set_xticks(x[-4:], [_thousands(n) for n in x[-4:]])
    axes.set(xlabel="tokens in the row", ylabel="GB above weights and inputs")


def _draw_sizes(axes: Axes, points: Sequence[dict[str, Any]]) -> None:
    vocabularies = sorted({p["vocab_size"] for p in points})
    depths = sorted({p["num_steps"] for p in points})
    colors = [PALE, "#5f93c1", ACCENT]
    width = 0.8 / len(depths)
    for index, depth in enumerate(depths):
        heights = [
            next(
                p["step_bytes"] / 1e9
                for p in points
                if (p["vocab_size"], p["num_steps"]) == (vocabulary, depth)
            )
            for vocabulary in vocabularies
        ]
        x = np.arange(len(vocabularies)) + (index - (len(depths) - 1) / 2) * width
        label = f"{depth} step{'s' if depth > 1 else ''}"
        axes.bar(x, heights, width * 0.94, color=colors[index % 3], label=label)
        for center, height in zip(x, heights, strict=True):
            axes.annotate(f"{height:.2f}", (center, height), (0, 3), "data", "offset points", ha="center")
    axes.set_xticks(range(len(vocabularies)), [_thousands(n) for n in vocabularies])
    axes.set(xlabel="vocabulary of the target", ylabel="GB above weights and inputs")
    axes.set_ylim(top=axes.get_ylim()[1] * 1.18)
    axes.legend(loc="upper left", ncols=3, frameon=False, borderpad=0, handlelength=0.9)


def _thousands(number: int) -> str:
    return f"{number // 1024}k" if number % 1024 == 0 else f"{number:,}"
