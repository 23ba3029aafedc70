"""The load test of capture, and the slow disk in it."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from eagle31.json_files import read_json
from tests.train.torchrun import ROOT, environment
from train.bench.capture_load.disturbances import Disturber
from train.bench.capture_load.processes import compile_slow_disk, switch_slow_disk

WRITE = """
import os, sys
with open(sys.argv[1], "wb") as file:
    file.write(bytes(200_000))
    file.flush()
    os.fsync(file.fileno())
"""


def test_the_disk_is_slow_below_its_directory_while_the_switch_is_on(tmp_path: Path) -> None:
    compile_slow_disk(tmp_path)
    slow, fast = tmp_path / "slow-disk", tmp_path / "fast"
    for directory in (slow, fast):
        directory.mkdir()
    own = {
        "LD_PRELOAD": str(tmp_path / "slow_disk.so"),
        "SLOW_DISK": str(slow),
        "SLOW_DISK_SWITCH": str(tmp_path / "slow"),
    }

    def seconds(path: Path) -> float:
        started = time.monotonic()
        command = [sys.executable, "-I", "-S", "-c", WRITE, str(path)]
        subprocess.run(command, env=os.environ | own, check=True)
        return time.monotonic() - started

    switch_slow_disk(tmp_path, True)
    assert seconds(slow / "a") >= 0.7  # 0.2 s for the bytes, and 0.5 s for fsync
    quick = min(seconds(fast / "a") for _ in range(2))
    switch_slow_disk(tmp_path, False)
    assert min(quick, seconds(slow / "b")) < 0.5


def test_signals_and_kinds_of_processes_take_turns() -> None:
    disturber = Disturber([], [])
    due = disturber._due
    assert len(set(due)) == len(due) == 10
    assert {name for name, _ in due} == {"SIGKILL", "SIGSTOP"}
    assert disturber.disturb() is None  # there is no process
    assert disturber.all_recovered


@pytest.mark.full("it starts three servers and six clients")
def test_clients_have_every_sample_once_though_processes_are_killed(
    vllm_python: Path, tmp_path: Path
) -> None:
    output = tmp_path / "result.json"
    command = [sys.executable, "scripts/bench/capture_load", "--minutes", "1.5", "--samples", "40"]
    done = subprocess.run(
        [*command, "--work", str(tmp_path / "work"), "--output", str(output)],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=1500,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result = read_json(output)
    assert result["passed"]
    assert result["largest_difference"] < 1e-4
    assert {one["kind"].split()[0] for one in result["disturbances"]} == {"SIGKILL", "SIGSTOP"}
    assert all(one["times"] == one["recovered"] for one in result["disturbances"])
    assert all(rounds > 0 for rounds in result["rounds"].values())
