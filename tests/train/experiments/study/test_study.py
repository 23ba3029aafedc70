"""The study's numbers from made-up counts. A trained run is measured in tests/train/experiments/quality."""

import runpy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data.conversations.perturbation import UNCHANGED, PromptSetting
from eagle31.errors import UserError
from train.evaluation.matrix import Cell
from train.experiments.study.comparison import CellCounts, by_condition, compare
from train.experiments.study.report import (
    condition_table,
    drift_table,
    kept_table,
    length_table,
    plot,
    position_table,
    seed_table,
)
from train.experiments.study.variants import DRAFTERS, TRAININGS, Variant, chosen_variants, parse_variant
from train.resampling.bootstrap import Resamples

ROOT = Path(__file__).resolve().parents[4]
SCRIPT: dict[str, Any] = runpy.run_path(str(ROOT / "scripts" / "experiments" / "study"))
NUM_PROMPTS, NUM_POSITIONS = 30, 8


def cell(domain: str, template: str = UNCHANGED) -> Cell:
    prompt_ids = tuple(f"{domain} {number}" for number in range(NUM_PROMPTS))
    return Cell(domain, PromptSetting(template=template), prompt_ids, ([1] * 100,) * NUM_PROMPTS)


CELLS = [cell(name) for name in ("held_out", "code")]


def measured_seed(seed: int, better_by: float = 1.0) -> dict[str, Any]:
    """Return counts whose accepted tokens are multiplied, so that other variants can be better."""
    rng = np.random.default_rng(seed)
    drafts = np.full((NUM_POSITIONS, NUM_PROMPTS), 40.0)
    positions = np.sort(rng.integers(4, 30, size=(NUM_POSITIONS, NUM_PROMPTS)), axis=0)[::-1] * better_by
    depth = [
        {"layers": [{"sink": 0.1, "context": 0.9, "own": 0.02 * step}], "state_rms": 1.0 + step}
        for step in range(NUM_POSITIONS)
    ]
    return {
        "drafts": drafts.tolist(),
        "accepted": positions.cumsum(axis=0).tolist(),
        "by_position": positions.tolist(),
        "drift": {"depth": depth},
    }


def measured() -> dict[str, list[dict[str, Any]]]:
    return {
        "eagle3": [measured_seed(0), measured_seed(1)],
        "same": [measured_seed(0), measured_seed(1)],
        "better": [measured_seed(0, 1.3), measured_seed(1, 1.3)],
    }


NOT_BETTER = [measured_seed(0), measured_seed(1)]


def test_lengths_rates_and_ratios_with_intervals() -> None:
    found = compare(CELLS[0], measured(), "eagle3", [4, 8])
    of_seeds = [measured_seed(seed) for seed in range(2)]
    lengths = [1 + np.sum(one["accepted"][3]) / np.sum(one["drafts"][3]) for one in of_seeds]
    assert found.by_seed[4]["eagle3"] == pytest.approx(lengths)
    assert found.lengths[4]["eagle3"].value == pytest.approx(np.mean(lengths))
    assert found.lengths[4]["eagle3"].low < np.mean(lengths) < found.lengths[4]["eagle3"].high
    # The same prompts and seeds in each resample: no difference has no width.
    same, better = found.ratios[8]["same"], found.ratios[8]["better"]
    assert (same.value, same.low, same.high) == (1, 1, 1)
    assert 1 < better.low <= better.value <= better.high < 1.3
    rates = [np.mean([np.sum(one["by_position"][7]) / (40 * NUM_PROMPTS) for one in of_seeds])]
    assert found.rates["eagle3"][7].value == pytest.approx(rates[0])
    values = [rate.value for rate in found.rates["better"]]
    assert values == sorted(values, reverse=True)


def test_an_interval_is_wider_where_seeds_differ() -> None:
    def width(*by_seed: dict[str, Any]) -> float:
        lengths = CellCounts.of(by_seed).lengths(8, Resamples(NUM_PROMPTS))
        return float(np.ptp(np.quantile(lengths, [0.025, 0.975])))

    alike = width(measured_seed(0), measured_seed(0))
    assert width(measured_seed(0), measured_seed(0, 1.5)) > 2 * alike


def test_conditions_are_geometric_means_over_domains() -> None:
    cells = [
        (cell(name, template), measured() if name == "held_out" else measured() | {"better": NOT_BETTER})
        for name in ("held_out", "code")
        for template in (UNCHANGED, "plain")
    ]
    base, plain, every = by_condition(cells, "eagle3", 8)
    alone = compare(CELLS[0], measured(), "eagle3", [8]).ratios[8]["better"]
    assert (base.name, plain.name, base.num_domains) == ("", "plain", 2)
    assert base.ratios["same"].value == every.ratios["same"].high == 1
    assert base.ratios["better"].value == pytest.approx(alone.value**0.5)
    assert every.ratios["better"].value == pytest.approx(alone.value**0.5)
    assert (
        every.kept["better"].value == plain.kept["better"].low == 1
    )  # the counts of both cells are the same


def test_what_is_kept_is_of_the_prompts_that_both_cells_have() -> None:
    base, other = cell("held_out"), cell("held_out", "plain")
    other = replace(other, prompt_ids=("new", *base.prompt_ids[1:]))
    worse = {name: [measured_seed(5), measured_seed(6)] for name in ("eagle3", "better")}
    of_base = {name: measured()[name] for name in worse}
    (_, plain, _) = by_condition([(base, of_base), (other, worse)], "eagle3", 8)

    def length(seeds: list[dict[str, Any]]) -> float:
        totals = [np.sum(np.array(one["accepted"])[7, 1:]) / (40 * (NUM_PROMPTS - 1)) for one in seeds]
        return float(1 + np.mean(totals))

    expected = length(worse["eagle3"]) / length(of_base["eagle3"])
    assert plain.kept["eagle3"].value == pytest.approx(expected)


def test_the_tables_and_the_picture(tmp_path: Path) -> None:
    cells = [compare(cell, measured(), "eagle3", [4, 8]) for cell in CELLS]
    conditions = by_condition(
        [(cell("held_out", name), measured()) for name in (UNCHANGED, "plain")], "eagle3", 8
    )
    ratios = condition_table(conditions)
    assert [line.split(" | ")[0] for line in ratios] == [
        "| condition",
        "| ---",
        "| as in training",
        "| plain",
        "| all",
    ]
    assert "1.00 (1.00-1.00) | **1." in ratios[2]  # bold: the interval does not hold 1
    kept = kept_table(conditions)
    assert [line.split(" | ")[0] for line in kept[2:]] == ["| plain", "| all"]
    tables = (length_table(cells, 4), position_table(cells[0]), seed_table(cells[0], 8), drift_table(cells))
    for lines in (*tables, ratios, kept):
        assert len({line.count("|") for line in lines}) == 1
    assert "| held_out | better | 8 | 10.0 % | 14.0 % | 8.00 |" in drift_table(cells)
    path = tmp_path / "study.png"
    plot(cells[0], conditions, path, k=8, reference="eagle3", note="small")
    assert path.stat().st_size > 20_000


def test_variants_are_chosen_and_parsed() -> None:
    assert chosen_variants(["eagle3", "templates"], ["deep=drafter.num_hidden_layers=2 data.turns=last"])[
        -1
    ] == Variant("deep", ("drafter.num_hidden_layers=2", "data.turns=last"))
    deep = parse_variant("deep=drafter.num_hidden_layers=2 data.turns=last")
    assert (deep.side.overrides, deep.data) == (("drafter.num_hidden_layers=2",), ("data.turns=last",))
    names = [variant.name for variant in (*DRAFTERS, *TRAININGS)]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        (["--variants", "nope"], "--variants"),
        (["--variant", "eagle3"], "--variant"),
        (["--variant", "eagle3=drafter=eagle3"], "--variant"),
        (["--variants"], "--variants"),
        (["--reference", "nope"], "--reference"),
        (["-k", "9"], "-k"),
        (["--seeds", "-1"], "--seeds"),
        (["--steps", "0"], "--steps"),
        (["--conversations", "nope.jsonl"], "--conversations"),
    ],
)
def test_bad_arguments_are_refused(arguments: list[str], field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["study", *arguments])
    with pytest.raises(UserError) as refused:
        SCRIPT["check_arguments"](SCRIPT["parse_arguments"]())
    assert refused.value.field == field


def test_the_overrides_of_every_variant_compose() -> None:
    from train.config.compose import composed

    for variant in (*DRAFTERS, *TRAININGS):
        composed(["recipe=quickstart", *variant.overrides])
