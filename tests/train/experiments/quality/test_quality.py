"""Small runs of the sides: kept weights, their acceptance, and what is reported of them."""

import runpy
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

from data.embedded.target import EmbeddedTarget
from data.store import HiddenStateStore
from data.target.parts import load_target_parts
from data.target.spec import TargetSpec
from eagle31.errors import UserError
from eagle31.json_files import read_json, read_jsonl
from tests.train.small_run import RECIPE, arguments
from train.drafter.published import validate_export
from train.evaluation.replay import packed, replay_greedily
from train.experiments.quality.acceptance import drafter_of, measure_run, own_drafter, served_checkpoint
from train.experiments.quality.dataset import Dataset, load_vocab, run_logged, target_tensors
from train.experiments.quality.report import default_levels, goals, measure, plot, table_lines, to_json
from train.experiments.quality.runs import RESULT, Run, Runner
from train.experiments.quality.sides import Side
from train.resampling.bootstrap import Resamples

ROOT = Path(__file__).resolve().parents[4]
SCRIPT: dict[str, Any] = runpy.run_path(str(ROOT / "scripts" / "experiments" / "quality"))
STEPS = 3


@pytest.fixture
def dataset(small_target: EmbeddedTarget, captured: Path) -> Dataset:
    parts = load_target_parts(TargetSpec(model=str(small_target.model), dtype="float32"))
    overrides = (f"recipe={RECIPE}", *arguments(small_target, captured))
    return Dataset(captured, overrides, small_target.model, parts)


def small_run(side: Side, seed: int = 0) -> Run:
    return Run(side, STEPS, keep_every=2, seed=seed, budget=f"{STEPS} steps", threads=1)


def test_a_run_of_eagle31(dataset: Dataset, tmp_path: Path) -> None:
    runner = Runner(dataset, tmp_path, jobs=1)
    run = small_run(Side("slow", ("optim.lr=1e-4",)))
    results = runner.train([run])
    result, directory = results[run], runner.path(run)
    assert not runner.failures
    kept = result["kept"]
    assert [one["step"] for one in kept] == [2, 3]
    assert 0 < kept[0]["step_seconds"] < kept[1]["step_seconds"] < result["wall_seconds"]
    assert result["spec"]["config"]["optim"]["lr"] == 1e-4

    # The trainer's own validation of the last step, on other prompts.
    own = own_drafter(dataset, run, load_vocab(dataset.artifacts["vocab"]))
    last = drafter_of(dataset, own, directory / kept[-1]["checkpoint"])
    store = HiddenStateStore(dataset.artifacts["capture"] / "validation")
    rows = packed(store[index] for index in range(len(store)))
    counts = replay_greedily(*last, rows, 8).counts()
    records = read_jsonl(directory / result["artifact"] / "metrics.jsonl")
    (validation,) = (one for one in records if one["kind"] == "validation" and one["step"] == STEPS)
    for k, expected in validation["acceptance_length"].items():
        drafts, accepted = (sum(counts[name][int(k) - 1]) for name in ("drafts", "accepted"))
        assert 1 + accepted / drafts == expected
    (trained,) = (one for one in records if one["kind"] == "train" and one["step"] == STEPS)
    supervised = sum(one["supervised_positions"] for one in records if one["kind"] == "train")
    assert kept[-1]["supervised_positions"] == supervised
    assert trained["seconds"] > 0

    measured = measure_run(dataset, run, result, directory)
    assert list(measured) == ["2", "3"]
    num_prompts = len(HiddenStateStore(dataset.artifacts["capture"] / "test"))
    assert all(len(of_k) == num_prompts for of_k in measured["3"]["drafts"])
    assert not validate_export(
        served_checkpoint(dataset, run, result, directory), TargetSpec(str(dataset.target))
    )

    # A finished run is not trained again.
    before = (directory / RESULT).stat().st_mtime_ns
    assert runner.train([run])[run] == result
    assert (directory / RESULT).stat().st_mtime_ns == before

    curve = SCRIPT["curve_of"]([run], results, {run: measured}, 4)
    found = measure([(curve, False)], Resamples(num_prompts))
    (reached,) = goals(found, [], found)
    assert reached.times_sooner is not None
    assert reached.times_sooner[0].value >= 1 - 1e-6  # of its own time, up to rounding
    assert "slow, 3 steps" in "\n".join(table_lines(found, [reached], [0.001], 4))
    figures = to_json(found, [reached], [0.001])
    assert figures["curves"][0]["steps"] == [2, 3]
    plot(found, tmp_path / "plot.png", k=4, note="small")
    assert (tmp_path / "plot.png").stat().st_size > 10_000
    assert default_levels(found) == []


def test_a_run_that_fails_is_reported_and_the_others_continue(
    dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(run: Run, directory: Path) -> dict[str, Any]:
        script = f"print('its last words'); raise SystemExit({run.seed})"
        run_logged([sys.executable, "-c", script], directory / "log.txt", 1)
        return {"kept": [{"step": 1, "step_seconds": 0.1}]}

    runner = Runner(dataset, tmp_path, jobs=2)
    monkeypatch.setattr(runner, "_train_eagle31", train)
    runs = [small_run(Side("eagle31"), seed) for seed in (0, 1)]
    assert list(runner.train(runs)) == runs[:1]
    assert "eagle31-3steps-seed1" in runner.failures[0]
    assert "its last words" in runner.failures[0]


@pytest.mark.full("it starts the peers")
@pytest.mark.parametrize("peer", ["speculators", "specforge"])
def test_a_run_of_a_peer(peer: str, dataset: Dataset, tmp_path: Path) -> None:
    setup = ROOT / "scripts" / "setup" / "peers"
    subprocess.run([setup, peer], check=True, stdout=subprocess.DEVNULL, timeout=1100)
    copied = replace(dataset, directory=Path(shutil.copytree(dataset.directory, tmp_path / "data")))
    save_file(target_tensors(copied), copied.tensors)
    runner = Runner(copied, tmp_path / "runs", jobs=1)
    run = small_run(Side(peer, is_peer=True))
    result = runner.train([run])[run]
    assert [one["step"] for one in result["kept"]] == [2, 3]
    ours = small_run(Side("eagle31"))
    own = runner.train([ours])[ours]
    # The same rows in the same order.
    supervised = [[one["supervised_positions"] for one in each["kept"]] for each in (result, own)]
    assert supervised[0] == supervised[1]
    assert result["ran"]["optimizers"] == {"speculators": ["Muon", "AdamW"], "specforge": ["AdamW"]}[peer]
    config = read_json(runner.path(run) / result["kept"][-1]["checkpoint"] / "config.json")
    assert config["fc_norm"]
    assert config["norm_output"] == (peer == "speculators")
    measured = measure_run(copied, run, result, runner.path(run))
    assert all(count > 0 for count in measured["3"]["drafts"][3])


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"minutes": [10.0, 0.0]}, "--minutes"),
        ({"k": 9}, "-k"),
        ({"seeds": [-1]}, "--seeds"),
        ({"jobs": 0}, "--jobs"),
        ({"conversations": Path("missing.jsonl")}, "--conversations"),
    ],
)
def test_bad_arguments_are_refused(
    monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any], field: str
) -> None:
    monkeypatch.setattr("sys.argv", ["quality", "--sides", "eagle31"])
    parsed = SCRIPT["parse_arguments"]()
    SCRIPT["check_arguments"](parsed)
    for name, value in changed.items():
        setattr(parsed, name, value)
    with pytest.raises(UserError) as refused:
        SCRIPT["check_arguments"](parsed)
    assert refused.value.field == field
