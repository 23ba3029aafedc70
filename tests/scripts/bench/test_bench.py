"""Each benchmark runs on something tiny, and its figures follow from what it measured."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from data.embedded.target import EmbeddedTarget
from scripts.bench import step_inputs
from scripts.bench.quality_runs import acceptance_lengths, minutes_until, parse_side
from tests.runs.here import run_command
from tests.scripts.bench.commands import command
from tests.train.conftest import small_target
from train.evaluation.intervals import Resamples

__all__ = ["small_target"]  # the fixture
TINY = step_inputs.Shape("tiny", "chat", 256, 64, 4, 2, 16, 96, 512, 128, num_steps=2)


def run(name: str, *arguments: str, cwd: Path) -> str:
    done = run_command(f"scripts/bench/{name}", *arguments, "--threads", "1", directory=cwd)
    assert done.status == 0, done.err
    return done.out


def test_step_times_both_of_our_sides(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    step = command("step")
    monkeypatch.setitem(step.SHAPES, "C", TINY)
    monkeypatch.setattr(sys, "argv", ["step", "--shapes", "C", "--rounds", "2", "--threads", "1", "--peers"])
    step.main()
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("eagle31 ")]
    heads, trained = [row[3] for row in rows], [float(row[4]) for row in rows]
    assert heads == ["trained", "frozen"]
    assert trained[0] >= trained[1]
    assert all(float(row[6].replace(",", "")) > 0 for row in rows)


def test_a_peer_is_compared_with_our_side_of_the_same_head() -> None:
    def side(name: str, head: str, seconds: float, step_bytes: int) -> dict:
        rounds = [{"wall_seconds": seconds * n, "cpu_seconds": seconds} for n in (1, 2, 3)]
        return {"side": name, "head": head, "rounds": rounds, "memory": {"step_bytes": step_bytes}}

    ours = side("eagle31", "trained", 2.0, 10), side("eagle31", "frozen", 1.0, 5)
    [found] = command("step").ratios([*ours, side("speculators", "frozen", 3.0, 50)])
    assert found == {"peer": "speculators", "speed": 3.0, "cpu_speed": 3.0, "memory": 0.1}


def test_capture_is_compared_with_prefill(small_target: EmbeddedTarget, tmp_path: Path) -> None:
    options = ("--samples", "8", "--rounds", "1", "--json", str(tmp_path / "out.json"))
    run("capture", str(small_target.model), *options, cwd=tmp_path)
    sides = json.loads((tmp_path / "out.json").read_text())["sides"]
    assert set(sides) == {"prefill", "exact"}
    assert all(one["wall_seconds"] > 0 for rounds in sides.values() for one in rounds)


def test_acceptance_lengths_draw_seeds_and_prompts() -> None:
    drafts, accepted = np.array([[2.0, 2.0], [2.0, 2.0]]), np.array([[2.0, 4.0], [0.0, 2.0]])
    found = acceptance_lengths(drafts, accepted, Resamples(2))
    assert found[0] == (2.5 + 1.5) / 2
    assert {1.0, 3.0} <= set(found[1:].round(3))  # one seed and one prompt alone


def test_when_a_curve_has_a_level() -> None:
    minutes, lengths = np.array([1.0, 2.0]), np.array([2.0, 3.0])
    found = [minutes_until(minutes, lengths, level) for level in (1.0, 1.5, 2.5, 4.0)]
    assert found == [0.0, 0.5, 1.5, np.inf]


def test_the_table_of_quality_says_when_a_side_has_what_the_best_peer_has() -> None:
    def curve(name: str, is_peer: bool, values: list[float]) -> dict:
        points = [
            {"minutes": i + 1.0, "acceptance_length": {"value": value, "low": value, "high": value}}
            for i, value in enumerate(values)
        ]
        return {"name": name, "is_peer": is_peer, "points": points}

    found = command("quality").table([curve("ours", False, [2.0, 3.0]), curve("peer", True, [1.2, 2.5])], 4)
    assert "until 2.50, the end of peer" in found[1]
    assert found[2].split()[-1] == "1.50"


def test_study_divides_by_eagle3() -> None:
    study = command("study")
    flat = {"eagle3": [np.full(5, 2.0)] * 8, "eagle3.1": [np.full(5, 3.0)] * 8}
    assert study.tables(flat)[-1].startswith("| eagle3.1 | 1.50 (1.50-1.50)")


@pytest.mark.full("trains three drafters, and the embedded target where it is missing")
def test_study_and_quality_train_and_measure(tmp_path: Path) -> None:
    small = ("--steps", "4", "--seeds", "0", "--prompts", "4", "--samples", "60")
    assert "| eagle3.1 | 1." in run(
        "study", *small, "--variants", "eagle3.1", "--output", "out", cwd=tmp_path
    )
    quality = ("--sides", "eagle31", "--points", "2", *small)
    assert "eagle31, 4 steps" in run("quality", *quality, "--output", "out", cwd=tmp_path)


def test_a_side_has_a_name_and_overrides() -> None:
    assert parse_side("a=optim.lr=1 train.seed=2").overrides == ("optim.lr=1", "train.seed=2")
