"""The study's numbers from made-up counts. A trained run is measured in tests/train/bench/quality."""

import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eagle31.errors import UserError
from train.bench.study.comparison import CellCounts, compare, geometric_mean
from train.bench.study.report import (
    drift_table,
    length_table,
    plot,
    position_table,
    ratio_table,
    seed_table,
)
from train.bench.study.variants import DRAFTERS, TRAININGS, Variant, chosen_variants, parse_variant
from train.evaluation.cells import Cell, FinishedCell
from train.resampling.bootstrap import Resamples

ROOT = Path(__file__).resolve().parents[4]
SCRIPT: dict[str, Any] = runpy.run_path(str(ROOT / "scripts" / "study"))
NUM_PROMPTS, NUM_POSITIONS = 30, 8
CELLS = [
    FinishedCell(Cell(name), "evaluation", Path(f"{name}-key/states"), ("some",) * NUM_PROMPTS, 100.0)
    for name in ("held_out", "code")
]


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


def test_the_mean_over_cells_is_geometric() -> None:
    other = measured() | {"better": [measured_seed(0), measured_seed(1)]}
    found = geometric_mean([(CELLS[0], measured()), (CELLS[1], other)], "eagle3", 8)
    alone = compare(CELLS[0], measured(), "eagle3", [8]).ratios[8]["better"]
    assert found["same"].value == 1
    assert found["better"].value == pytest.approx(alone.value**0.5)


def test_the_tables_and_the_picture(tmp_path: Path) -> None:
    cells = [compare(cell, measured(), "eagle3", [4, 8]) for cell in CELLS]
    over_all = geometric_mean([(cell, measured()) for cell in CELLS], "eagle3", 8)
    ratios = ratio_table(cells, 8, "eagle3", over_all)
    assert [line.split(" | ")[0] for line in ratios] == [
        "| cell",
        "| ---",
        "| held_out",
        "| code",
        "| geometric mean",
    ]
    assert "1.00 (1.00-1.00) | **1." in ratios[2]  # bold: the interval does not hold 1
    for lines in (
        length_table(cells, 4),
        position_table(cells[0]),
        seed_table(cells[0], 8),
        drift_table(cells),
    ):
        assert len({line.count("|") for line in lines}) == 1
    assert "| held_out | better | 8 | 10.0 % | 14.0 % | 8.00 |" in drift_table(cells)
    path = tmp_path / "study.png"
    plot(cells, path, k=8, reference="eagle3", note="small")
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
    from train.compose import composed

    for variant in (*DRAFTERS, *TRAININGS):
        composed(["recipe=quickstart", *variant.overrides])
