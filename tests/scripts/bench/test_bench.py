"""Each benchmark runs on something tiny, and its figures follow from what it measured."""

import json
import sys
from pathlib import Path

import pytest

from data.embedded.target import EmbeddedTarget
from scripts.bench import step_inputs
from tests.runs.here import run_command
from tests.scripts.bench.commands import command
from tests.train.conftest import small_target

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


@pytest.mark.full("trains three drafters, and the embedded target where it is missing")
def test_study_and_quality_train_and_measure(tmp_path: Path) -> None:
    small = ("--steps", "4", "--seeds", "0", "--prompts", "4", "--samples", "60")
    assert "| eagle3.1 | 1." in run(
        "study", *small, "--variants", "eagle3.1", "--output", "out", cwd=tmp_path
    )
    quality = ("--sides", "eagle31", "--points", "2", *small)
    assert "eagle31, 4 steps" in run("quality", *quality, "--output", "out", cwd=tmp_path)
