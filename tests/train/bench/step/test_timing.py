"""Step benchmarks at a tiny size, with eagle31's sides only."""

from pathlib import Path
from typing import Any

import pytest

from eagle31.cost.flops import StepCounts
from eagle31.errors import UserError
from train.bench.peers.environment import find_python
from train.bench.step.report import fit_line, plot_memory, plot_sides, shape_lines
from train.bench.step.shapes import Shape
from train.bench.step.sides import OURS, SideFailure, SideProcess
from train.bench.step.timing import Settings, like_for_like, peak_memory, summarize_side, time_shape

ROOT = Path(__file__).resolve().parents[4]
TINY = Shape(
    "A",
    "chat",
    row_tokens=512,
    hidden_size=64,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    intermediate_size=96,
    vocab_size=512,
    draft_vocab_size=128,
    num_steps=3,
)
COUNTS = StepCounts(keys=90, rows=(60, 57, 53), tokens=91, causal_pairs=2700, teachers=60)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    logs = tmp_path_factory.mktemp("logs")
    settings = Settings(rounds=3, num_rows=2, threads=1, dtype="float32", device="cpu", log_directory=logs)
    return time_shape(TINY, [], None, settings)


def test_both_heads_run_the_same_rows(measured: dict[str, Any]) -> None:
    trained, frozen = measured["sides"]
    assert (trained["head"], frozen["head"]) == ("trained", "frozen")
    assert trained["trains_head"]
    assert not frozen["trains_head"]
    assert trained["num_trained"] - frozen["num_trained"] == 64 * 128
    for a, b in zip(trained["rounds"], frozen["rounds"], strict=True):
        assert a["row"] == b["row"]
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)
    assert [r["row"] for r in trained["rounds"]] == [0, 1, 0]
    assert trained["rounds"][0]["loss"] != trained["rounds"][1]["loss"]


def test_memory_is_the_steps(measured: dict[str, Any]) -> None:
    for side in measured["sides"]:
        memory = side["memory"]
        assert memory["peak_bytes"] - memory["baseline_bytes"] == memory["step_bytes"]
        # At least the gradients of what is trained, and less than a tiny step could ever need.
        assert 4 * side["num_trained"] < memory["step_bytes"] < 300e6


def test_table_shows_speed_memory_and_the_peak(measured: dict[str, Any], tmp_path: Path) -> None:
    lines = shape_lines(measured, "float32")
    assert any(line.startswith("eagle31") and "trained" in line for line in lines)
    failed = {"side": "specforge", "head": "trained", "rounds": [], "error": "out of memory"}
    lines_with_failure = shape_lines(measured | {"sides": [*measured["sides"], failed]}, "float32")
    assert "specforge: out of memory" in lines_with_failure
    assert any("% of the measured GEMM peak" in line for line in lines)
    for side in measured["sides"]:
        assert 0 < side["fraction_of_peak"] < 1.5
    plot_sides([measured], tmp_path / "sides.png", "float32")
    assert (tmp_path / "sides.png").stat().st_size > 10_000


def fake(side: str, head: str, wall: list[float], step_bytes: int) -> dict[str, Any]:
    rounds = [
        {"row": 0, "num_tokens": 100, "wall_seconds": w, "cpu_seconds": 2 * w, "loss": 1.0} for w in wall
    ]
    memory = {"step_bytes": step_bytes, "baseline_bytes": 100, "peak_bytes": step_bytes + 100}
    return {"side": side, "head": head, "rounds": rounds, "memory": memory}


def test_ratios_are_like_for_like() -> None:
    measured = {
        "sides": [
            fake("eagle31", "trained", [2.0, 2.0, 2.0], 300),
            fake("eagle31", "frozen", [1.0, 2.0, 1.0], 200),
            fake("speculators", "frozen", [4.0, 6.0, 5.0], 400),
            fake("specforge", "trained", [8.0, 8.0, 8.0], 900),
        ]
    }
    speculators, specforge = like_for_like(measured)
    assert speculators["speed"] == 4.0  # of 4, 3 and 5, round by round
    assert speculators["memory"] == 0.5
    assert speculators["whole_memory"] == 300 / 500
    assert specforge["speed"] == 4.0
    assert specforge["memory"] == pytest.approx(1 / 3)


def test_fraction_of_the_peak_uses_the_given_clock() -> None:
    gemm = [{"gemm": [{"cpu_flops": 4e9, "wall_flops": 8e9}, {"cpu_flops": 5e9, "wall_flops": 7e9}]}]
    result = fake("eagle31", "trained", [0.1], 100)
    by_cpu, by_wall = (summarize_side(result, TINY, [COUNTS], gemm, clock) for clock in ("cpu", "wall"))
    assert by_cpu["tokens_per_second"] == pytest.approx(1000)
    assert by_cpu["peak_flops"] == 5e9
    assert by_cpu["fraction_of_peak"] == pytest.approx(by_cpu["flops"]["total"] / 0.2 / 5e9)
    assert by_wall["fraction_of_peak"] == pytest.approx(by_cpu["flops"]["total"] / 0.1 / 8e9)


def test_failed_side_reports_the_reason(tmp_path: Path) -> None:
    with (
        SideProcess(
            OURS[0],
            TINY,
            tmp_path / "missing.safetensors",
            1,
            threads=1,
            dtype="float32",
            device="cpu",
            log_path=tmp_path / "side.log",
        ) as process,
        pytest.raises(SideFailure, match=r"missing\.safetensors"),
    ):
        process.start()


def test_peer_that_is_not_installed_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("EAGLE31_CACHE", str(tmp_path))
    with pytest.raises(UserError, match="scripts/setup/peers specforge"):
        find_python("specforge")


def test_peak_memory_and_its_picture(tmp_path: Path) -> None:
    settings = Settings(1, 1, 1, "float32", "cpu", tmp_path)
    small = peak_memory(TINY, settings)["step_bytes"]
    assert small > 0
    by_length = [
        {
            "row_tokens": n,
            "hidden_size": 256,
            "num_steps": 7,
            "vocab_size": 32_768,
            "step_bytes": 1000 * n + 5_000_000,
        }
        for n in (1024, 2048, 4096, 8192)
    ]
    slope, intercept, deviation = fit_line(by_length)
    assert slope == pytest.approx(1000)
    assert intercept == pytest.approx(5e6)
    assert deviation < 1e-6
    by_size = [
        {"row_tokens": 4096, "hidden_size": 256, "num_steps": k, "vocab_size": v, "step_bytes": 10**9 + k}
        for v in (8192, 32_768)
        for k in (1, 4)
    ]
    plot_memory(by_length, by_size, tmp_path / "memory.png")
    assert (tmp_path / "memory.png").stat().st_size > 10_000
