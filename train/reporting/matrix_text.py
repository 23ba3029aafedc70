"""The robustness matrix in words and tables."""

from collections.abc import Mapping
from typing import Any

from train.reporting.results import at_draft_length, interval_of, with_interval
from train.tables import aligned


def matrix_of(evaluation: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the matrix of an evaluation; None without one."""
    found: dict[str, Any] | None = evaluation.get("matrix")
    return found


def matrix_table(matrix: Mapping[str, Any]) -> list[list[str]]:
    """Return a header, and a row for each cell."""
    rows = [["cell", "prompts", "prompt tokens", f"acceptance length, k = {matrix['k']}", "of its base cell"]]
    for cell in matrix["cells"]:
        stats = at_draft_length(cell, matrix["k"])
        ratio = stats["ratio"]
        rows.append(
            [
                cell["name"],
                str(cell["num_prompts"]),
                f"{cell['mean_prompt_tokens']:.0f}",
                with_interval(stats),
                "" if ratio is None else f"{ratio['value']:.2f} ({interval_of(ratio)})",
            ]
        )
    return rows


def describe_worst(matrix: Mapping[str, Any]) -> str:
    """Return a sentence that names the worst cells."""
    cells = {cell["name"]: cell for cell in matrix["cells"]}
    if not matrix["worst"]:
        return "No cell has a shorter acceptance length than its base cell."
    parts = []
    for name in matrix["worst"]:
        stats = at_draft_length(cells[name], matrix["k"])
        ratio = stats["ratio"]
        of_base = "" if ratio is None else f", {ratio['value']:.2f} times its base cell's"
        parts.append(f"{name} ({stats['acceptance_length']:.2f}{of_base})")
    return f"Worst cells at k = {matrix['k']}: {'; '.join(parts)}."


def describe_left_out(matrix: Mapping[str, Any]) -> list[str]:
    """Return why cells are left out, one line for each reason."""
    names: dict[str, list[str]] = {}
    for one in matrix["left_out"]:
        names.setdefault(one["reason"], []).append(one["name"])
    return [f"Left out: {', '.join(found)}. {reason}" for reason, found in names.items()]


def format_matrix(matrix: Mapping[str, Any]) -> str:
    """Return the table and the worst cells for the terminal."""
    lines = [*aligned(matrix_table(matrix)), "", describe_worst(matrix), *describe_left_out(matrix)]
    return "\n".join(lines)
