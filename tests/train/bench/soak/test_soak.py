"""The soak: its slopes, and a short one."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from eagle31.json_files import read_json
from tests.train.torchrun import ROOT, environment
from train.bench.soak.slopes import slope_of


def test_a_slope_is_found_with_its_interval() -> None:
    noise = np.random.default_rng(0)
    seconds = list(range(0, 1800, 5))
    flat = [100 + noise.normal() for _ in seconds]
    rising = [value + 10 * second / 3600 for value, second in zip(flat, seconds, strict=True)]
    one, other = slope_of(seconds, flat), slope_of(seconds, rising)
    assert one.low < 0 < one.high
    assert one.r_squared < 0.3
    assert 0 < other.low < 10 < other.high
    assert other.r_squared > 0.9
    assert other.per_hour - one.per_hour == pytest.approx(10)
    constant = slope_of(seconds, [7.0] * len(seconds))
    assert (constant.mean, constant.per_hour, constant.low, constant.high, constant.r_squared) == (
        7,
        0,
        0,
        0,
        0,
    )
    with pytest.raises(ValueError, match="3 values"):
        slope_of([0, 1, 2], [1, 2, 3])


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("source", "min_kills"), [("hf", 4), ("vllm", 2)])
def test_a_short_soak_reads_every_sample_once(
    source: str, min_kills: int, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if not request.config.getoption("--full"):
        pytest.skip("part of scripts/test --full")
    if source == "vllm":
        request.getfixturevalue("vllm_python")
    result = tmp_path / "result.json"
    options = ["--source", source, "--minutes", "2", "--every", "20", "--output", str(result)]
    command = [sys.executable, ROOT / "scripts" / "bench" / "soak", *options]
    subprocess.run(command, env=environment(), check=False, timeout=1100)
    found = read_json(result)
    assert sum(found["kills"].values()) >= min_kills
    # The share of the throughput depends on the machine, and so do slopes over two minutes.
    for name in (
        "every sample once in each epoch",
        "states as captured without kills",
        "nothing left in the spool",
    ):
        assert found["checks"][name], found
