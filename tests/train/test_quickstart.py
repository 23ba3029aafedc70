"""The quickstart as a user types it, made small."""

import contextlib
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import psutil

from data.embedded.target import EmbeddedTarget
from eagle31.json_files import read_json
from tests.processes import listening
from tests.runs.forked import ROOT, RUN_SECONDS, environment
from tests.train.small_quickstart import small_quickstart

STEPS = 12
LOOK_SECONDS = 0.5


def test_quickstart_exports_a_drafter_and_prints_what_it_gains(
    small_target: EmbeddedTarget, tmp_path: Path
) -> None:
    small = small_quickstart(small_target, tmp_path)
    small += [
        "data.num_validation=6",
        "data.num_test=4",
        f"train.max_steps={STEPS}",
        "capture.max_samples=60",
    ]
    small += ["train.validate_every=6"]
    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    with (tmp_path / "printed").open("w") as file:
        started = psutil.Popen(
            [ROOT / "scripts" / "quickstart", *small],
            cwd=tmp_path,
            env=environment() | {"EAGLE31_NO_VENV": "1", "PATH": programs},
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    addresses = addresses_until_the_end(started)
    printed = (tmp_path / "printed").read_text()
    assert started.returncode == 0, printed
    assert addresses == {"127.0.0.1"}  # the process group's
    _, heading, table = printed.partition("acceptance length")
    row = re.search(r"^trained +greedy +4 +0 +(\d+\.\d+) ", table, re.MULTILINE)
    assert heading, printed
    assert row, printed
    assert float(row[1]) >= 1
    assert read_json(tmp_path / "run" / "export" / "config.json")["norm_output"] is True
    assert (tmp_path / "run" / "export" / "model.safetensors").is_file()
    assert (tmp_path / "run" / "report" / "index.html").is_file()
    [curve] = (tmp_path / "run" / "artifacts").glob("train-*/metrics.jsonl")
    assert f'"step": {STEPS},' in curve.read_text()


def addresses_until_the_end(started: psutil.Popen) -> set[str]:
    """Wait for a process to end, and return the addresses on which it and its children have listened."""
    found, deadline = set(), time.monotonic() + RUN_SECONDS
    while started.poll() is None:
        assert time.monotonic() < deadline, "the run takes too long"
        with contextlib.suppress(psutil.NoSuchProcess):
            for one in [started, *started.children(recursive=True)]:
                found |= {address for address, _ in listening(one)}
        time.sleep(LOOK_SECONDS)
    return found
