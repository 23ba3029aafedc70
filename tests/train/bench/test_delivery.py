import subprocess
from pathlib import Path

import pytest

from eagle31.json_files import read_json
from tests.train.torchrun import ROOT, environment, preloaded_python


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict, str]:
    """Return the results and the output of a short round of each side."""
    path: Path = tmp_path_factory.mktemp("bench") / "result.json"
    command = [
        preloaded_python(),
        "scripts/bench/delivery",
        "--rounds",
        "1",
        "--steps",
        "3",
        "--spool-gb",
        "0.05",
    ]
    done = subprocess.run(
        [*command, "--output", str(path)],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    return read_json(path), done.stdout


def test_both_sides_are_measured_in_every_round(measured: tuple[dict, str]) -> None:
    result, _ = measured
    for side in ("offline", "online"):
        assert len(result[side]["rounds"]) == 1
        assert result[side]["steps_per_second"] > 0
        assert 0 < result[side]["data_wait_fraction"] < 1
    assert result["online_of_offline"] == pytest.approx(
        result["online"]["steps_per_second"] / result["offline"]["steps_per_second"]
    )


def test_output_has_the_result(measured: tuple[dict, str]) -> None:
    result, printed = measured
    assert f"online reaches {result['online_of_offline']:.1%} of offline" in printed
