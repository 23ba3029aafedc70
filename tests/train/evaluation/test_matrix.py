"""The results of a matrix: ratios to the base cells, and the worst cells."""

from typing import Any

import pytest

from train.evaluation.matrix import matrix_result


def cell(
    condition: str, drafts: list[int], accepted: list[int], ids: str, domain: str = "d"
) -> dict[str, Any]:
    length = 1 + sum(accepted) / sum(drafts)
    row = {"k": 1, "acceptance_length": length}
    counts = {"drafts": [drafts], "accepted": [accepted]}
    name = f"{domain}/{condition}" if condition else domain
    return {
        "name": name,
        "domain": domain,
        "condition": condition,
        "prompt_ids": list(ids),
        "by_draft_length": [row],
        "by_prompt": counts,
    }


def ratios(*cells: dict[str, Any]) -> list[Any]:
    return [one["by_draft_length"][0]["ratio"] for one in matrix_result(cells, [], 1)["cells"]]


def test_the_ratio_is_that_of_the_common_prompts() -> None:
    base = cell("", [4, 4, 4], [4, 2, 0], "abc")
    none, found = ratios(base, cell("plain", [4, 4], [2, 1], "bd"))
    assert none is None
    assert found == {"value": 1.0, "low": 1.0, "high": 1.0, "num_prompts": 1}  # 1.5 of b in both
    _, halved = ratios(base, cell("plain", [4, 4, 4], [0, 2, 4], "cba"))
    assert halved["value"] == 1.0
    # Each prompt accepts half as much, whichever prompts are drawn: pairing leaves a narrow interval.
    _, paired = ratios(cell("", [1] * 8, [0, 1] * 4, "abcdefgh"), cell("x", [2] * 8, [0, 1] * 4, "abcdefgh"))
    assert paired["value"] == pytest.approx(1.25 / 1.5)
    assert paired["high"] <= 1
    assert ratios(base, cell("plain", [1], [1], "z")) == [None, None]


def test_the_worst_cells_are_those_that_lose_most() -> None:
    cells = [
        cell("", [4], [4], "a"),
        cell("bad", [4], [1], "a"),
        cell("good", [4], [5], "a"),
        cell("worse", [4], [0], "a"),
        cell("", [4], [0], "a", domain="other"),
    ]
    assert matrix_result(cells, [], 1)["worst"] == ["d/worse", "d/bad"]
    bases = [cells[0], cells[4]]
    assert matrix_result(bases, [], 1)["worst"] == ["other", "d"]
