"""The picture of the robustness matrix."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, TwoSlopeNorm
from matplotlib.patches import Rectangle

from train.reporting.matrix_text import matrix_of
from train.reporting.plots import Panel
from train.reporting.results import at_draft_length

UNPERTURBED = "unchanged"
# Orange loses and blue gains, which differ for every kind of color vision. Both are pale enough for text.
_LOSS_AND_GAIN = LinearSegmentedColormap.from_list("loss_and_gain", ["#f2a65a", "#f7f5f0", "#8fbce6"])
_TEXT, _FAINT = "#111111", "#4d4d4d"  # on the colors above, on a light and on a dark page
_ROW_INCHES = 0.3
MIN_SPREAD = 0.2  # the ratio's distance from 1 that has at least the full color


def matrix_panels(evaluation: Mapping[str, Any]) -> dict[str, Panel]:
    """Return the heat map by its name; empty without a matrix."""
    matrix = matrix_of(evaluation)
    if matrix is None:
        return {}
    conditions, domains = _axes_of(matrix["cells"])
    note = (
        f"k = {matrix['k']}, temperature 0, by replay. Colors: ratio to the same "
        "prompts without the change. Bold: the 95 % interval of the ratio excludes 1."
    )
    panel = Panel(
        "matrix",
        "Acceptance length by cell",
        note,
        lambda axes: _draw(axes, matrix["cells"], matrix["k"], conditions, domains),
        height=1.1 + _ROW_INCHES * len(conditions),
        label_inches=0.2 + 0.07 * max(map(len, conditions)),
    )
    return {panel.name: panel}


def _axes_of(cells: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[str]]:
    """Return the conditions and the domains in the order of the cells, the base cells first."""
    conditions = sorted(dict.fromkeys(cell["condition"] for cell in cells), key=bool)
    return conditions, list(dict.fromkeys(cell["domain"] for cell in cells))


def _draw(
    axes: Axes,
    cells: Sequence[dict[str, Any]],
    draft_tokens: int,
    conditions: Sequence[str],
    domains: Sequence[str],
) -> None:
    found = {(cell["condition"], cell["domain"]): at_draft_length(cell, draft_tokens) for cell in cells}
    ratios = [stats["ratio"]["value"] for stats in found.values() if stats["ratio"] is not None]
    spread = max([MIN_SPREAD, *(abs(ratio - 1) for ratio in ratios)])
    scale = TwoSlopeNorm(1.0, max(0.0, 1 - spread), 1 + spread)
    for row, condition in enumerate(conditions):
        for column, domain in enumerate(domains):
            stats = found.get((condition, domain))
            if stats is None:
                _write(axes, column, row, "–", _FAINT)
                continue
            ratio = stats["ratio"]
            color = "#e9e9e9" if ratio is None else _LOSS_AND_GAIN(scale(ratio["value"]))
            axes.add_patch(Rectangle((column - 0.48, row - 0.46), 0.96, 0.92, color=color, linewidth=0))
            certain = ratio is not None and (ratio["high"] < 1 or ratio["low"] > 1)
            _write(axes, column, row, f"{stats['acceptance_length']:.2f}", _TEXT, bold=certain)
    axes.set(xlim=(-0.5, len(domains) - 0.5), ylim=(len(conditions) - 0.5, -0.5))
    names = [domain.replace(".", ".\n") for domain in domains]
    rotated = len(domains) > 4 or max(map(len, domains)) > 12
    angle, side = (40, "right") if rotated else (0, "center")
    axes.set_xticks(range(len(domains)), names, rotation=angle, ha=side)
    axes.set_yticks(range(len(conditions)), [_readable(one) for one in conditions])
    axes.grid(False)
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)


def _write(axes: Axes, column: int, row: int, text: str, color: str, *, bold: bool = False) -> None:
    weight = "bold" if bold else "normal"
    axes.text(column, row, text, ha="center", va="center", color=color, fontsize=9.5, fontweight=weight)


def _readable(condition: str) -> str:
    return condition.replace("_", " ").replace("+", ", ") or UNPERTURBED
