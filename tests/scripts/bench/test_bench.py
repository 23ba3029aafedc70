"""Each benchmark runs on something tiny, and its figures follow from what it measured."""

import sys
from pathlib import Path

import numpy as np
import pytest

from eagle31.errors import UserError
from scripts.bench import step_inputs
from scripts.bench.peers import PEERS
from tests.data.conversations.jsonl_files import write_jsonl
from tests.runs.here import run_command
from tests.scripts.bench.commands import command
from tests.train.conftest import small_target

__all__ = ["small_target"]  # the fixture
TINY = step_inputs.Shape("tiny", "chat", 256, 64, 4, 2, 16, 96, 512, 128, num_steps=2)


def run(name: str, *arguments: str, cwd: Path) -> str:
    done = run_command(f"scripts/bench/{name}", *arguments, directory=cwd)
    assert done.status == 0, done.err
    return done.out


@pytest.mark.full("it starts a process for each side")
def test_step_times_both_of_our_sides(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    step = command("step")
    monkeypatch.setitem(step.SHAPES, "C", TINY)
    arguments = ["--shapes", "C", "--rows", "1", "--sides", "eagle31", "eagle31-frozen"]
    monkeypatch.setattr(sys, "argv", ["step", *arguments])
    step.main()
    rows = [
        line.split()
        for line in capsys.readouterr().out.splitlines()
        if line.startswith(("eagle31 ", "eagle31-frozen "))
    ]
    heads, trained = [row[1] for row in rows], [float(row[2]) for row in rows]
    assert heads == ["trained", "frozen"]
    assert trained[0] >= trained[1]
    assert all(float(row[4].replace(",", "")) > 0 for row in rows)


def test_quality_says_when_each_side_has_what_the_better_peer_has_at_its_end() -> None:
    quality = command("quality")

    def curve(name: str, minutes: list[float], *values: float) -> quality.Curve:
        lengths = [np.full(3, value) for value in values]
        ends = {"chat": dict.fromkeys(quality.COLUMNS, lengths[-1])}
        return quality.Curve(name, name in PEERS, minutes, {"chat": lengths}, ends)

    sides = (
        curve("specforge", [10, 20], 1.2, 1.4),
        curve("speculators", [10, 20], 1.5, 2.5),
        curve("eagle31", [1, 2], 2.0, 3.0),
        curve("slow", [1, 2], 1.1, 1.2),
    )
    rows = [line.split() for line in quality.over_time(list(sides), "chat")]
    assert " ".join(rows[0]).endswith("minutes until 2.50, the end of speculators")
    assert [row[-1] for row in rows[1:]] == ["inf", "20.0", "1.5", "inf"]
    assert quality.at_the_end(list(sides))[3] == ["eagle31", "chat", *["3.00 (3.00-3.00)"] * 4]


def test_a_side_is_a_peer_or_eagle31_with_settings() -> None:
    quality = command("quality")
    faster = quality.parse_side("speculators=rate=3 ttt_steps=4", quality.SIDES)
    assert (faster.is_peer, faster.label) == (True, "speculators rate=3 ttt_steps=4")
    cosine = quality.parse_side("cosine=optim.schedule=cosine", quality.SIDES)
    assert (cosine.is_peer, cosine.label) == (False, "cosine")
    for text in ("unknown", "cosine=cosine", "speculators=optim.lr=0.1"):
        with pytest.raises(UserError, match="--sides"):
            quality.parse_side(text, quality.SIDES)


@pytest.mark.full("trains drafters, and the targets where they are missing")
def test_study_and_quality_train_and_measure(tmp_path: Path) -> None:
    small = ("--set", "train.max_steps=4", "data.num_test=4", "data.max_samples=60")
    found = run(
        "study", "--sides", "eagle3", "eagle3.1", "--equal-minutes", "--seeds", "0", *small, cwd=tmp_path
    )
    assert "| eagle3 | 4 |" in found
    held_out = write_jsonl(
        tmp_path / "held_out.jsonl", [{"prompt": f"Write a function for {n}."} for n in range(6)]
    )
    options = (
        "--target",
        "embedded",
        "--seeds",
        "0",
        "--held-out",
        held_out,
        "--plot",
        tmp_path / "claims.png",
    )
    table = run("claims", *options, *small, cwd=tmp_path)
    assert "no template, no first token" in table
    assert "eagle3.1-2steps: state RMS" in table
    picture = tmp_path / "quality.png"
    options = ("--sides", "eagle31", "--seeds", "0", "--plot", picture, *small)
    assert "eagle31, 4 steps" in run("quality", *options, cwd=tmp_path)
    assert picture.stat().st_size > 10_000
