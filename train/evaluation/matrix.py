"""The results of the robustness matrix: the acceptance in each cell, compared with the domain's base cell."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from train.evaluation.cells import Cell, LeftOut
from train.evaluation.replay import PromptAcceptance
from train.resampling.paired import paired_ratio

NUM_WORST = 3


def cell_result(
    cell: Cell, prompt_ids: Sequence[str], mean_prompt_tokens: float, acceptance: PromptAcceptance
) -> dict[str, Any]:
    """Return what evaluation.json has of one cell, but for the comparison with its base cell."""
    return cell_names(cell) | {
        "num_prompts": len(acceptance.by_prompt),
        "mean_prompt_tokens": mean_prompt_tokens,
        "prompt_ids": list(prompt_ids),
        **acceptance.to_json(),
    }


def cell_names(cell: Cell) -> dict[str, Any]:
    """Return what a cell is called and what it differs in; other cells can have the same prompts."""
    return {
        "name": cell.name,
        "domain": cell.domain,
        "condition": cell.condition,
        "setting": asdict(cell.setting),
    }


def matrix_result(
    cells: Sequence[dict[str, Any]], left_out: Sequence[LeftOut], draft_tokens: int
) -> dict[str, Any]:
    """Return `matrix` of evaluation.json.

    Each draft length of a cell gets its `ratio` to the domain's base cell, over the prompts that both have;
    None for a base cell and where they share none.

    Args:
        cells: from `cell_result`.
        draft_tokens: the draft length that decides which cells are worst.
    """
    bases = {cell["domain"]: cell for cell in cells if not cell["condition"]}
    compared = [with_ratios(cell, bases.get(cell["domain"])) for cell in cells]
    return {
        "k": draft_tokens,
        "cells": compared,
        "left_out": [asdict(one) for one in left_out],
        "worst": worst_cells(compared, draft_tokens),
    }


def with_ratios(cell: dict[str, Any], base: dict[str, Any] | None) -> dict[str, Any]:
    """Return the cell with its ratios to the base cell."""
    ratios: list[dict[str, Any] | None] = [None] * len(cell["by_draft_length"])
    if base is not None and base is not cell:
        ratios = [ratio_at(cell, base, index) for index in range(len(ratios))]
    rows = [row | {"ratio": ratio} for row, ratio in zip(cell["by_draft_length"], ratios, strict=True)]
    return cell | {"by_draft_length": rows}


def ratio_at(cell: Mapping[str, Any], base: Mapping[str, Any], index: int) -> dict[str, Any] | None:
    """Return the ratio of two cells' acceptance lengths with its interval over their common prompts.

    Both are computed with the same resamples of these prompts, so that the interval does not include how
    much prompts differ from each other.

    Args:
        index: of the draft length.
    """
    positions = [{one: place for place, one in enumerate(side["prompt_ids"])} for side in (cell, base)]
    common = [one for one in positions[0] if one in positions[1]]
    if not common:
        return None
    ours, theirs = (
        _of_prompts(side, [places[one] for one in common], index)
        for side, places in zip((cell, base), positions, strict=True)
    )
    found = paired_ratio(ours, theirs, 0)
    return {"value": found.value, "low": found.low, "high": found.high, "num_prompts": len(common)}


def _of_prompts(side: Mapping[str, Any], prompts: Sequence[int], index: int) -> dict[str, Any]:
    """Return the counts of some prompts at one draft length."""
    counts = side["by_prompt"]
    return {"by_prompt": {name: [[counts[name][index][one] for one in prompts]] for name in counts}}


def worst_cells(cells: Sequence[dict[str, Any]], draft_tokens: int) -> list[str]:
    """Return the names of the cells that lose most against their base cells, the worst first.

    Where nothing is compared, they are the cells with the shortest acceptance lengths.
    """
    at_k = {
        cell["name"]: next(row for row in cell["by_draft_length"] if row["k"] == draft_tokens)
        for cell in cells
    }
    losses = {
        name: row["ratio"]["value"]
        for name, row in at_k.items()
        if row["ratio"] is not None and row["ratio"]["value"] < 1
    }
    if any(row["ratio"] is not None for row in at_k.values()):
        return sorted(losses, key=losses.__getitem__)[:NUM_WORST]
    lengths = {name: row["acceptance_length"] for name, row in at_k.items()}
    return sorted(lengths, key=lengths.__getitem__)[:NUM_WORST] if len(lengths) > 1 else []
