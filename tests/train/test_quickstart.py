"""The quickstart as a user types it, made small."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from data.embedded.target import EmbeddedTarget
from eagle31.json_files import read_json
from tests.runs.forked import ROOT, environment
from tests.train.small_quickstart import small_quickstart

STEPS = 48


def test_quickstart_exports_a_drafter_and_prints_what_it_gains(
    small_target: EmbeddedTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = small_quickstart(small_target, tmp_path, monkeypatch)
    small += [
        "data.num_validation=6",
        "data.num_test=4",
        f"train.max_steps={STEPS}",
        "data.max_samples=60",
    ]
    small += ["train.validate_every=6"]
    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        [ROOT / "scripts" / "quickstart", *small],
        cwd=tmp_path,
        env=environment() | {"EAGLE31_NO_VENV": "1", "PATH": programs},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    printed = done.stdout
    assert done.returncode == 0, printed
    _, heading, table = printed.partition("acceptance length")
    row = re.search(r"^trained +greedy +4 +0 +(\d+\.\d+) ", table, re.MULTILINE)
    assert heading, printed
    assert row, printed
    untrained = re.search(r"^untrained +greedy +4 +0 +(\d+\.\d+) ", table, re.MULTILINE)
    assert untrained, printed
    assert float(row[1]) > float(untrained[1]), printed
    assert read_json(tmp_path / "run" / "export" / "config.json")["norm_output"] is True
    assert (tmp_path / "run" / "export" / "model.safetensors").is_file()
    assert (tmp_path / "run" / "report" / "index.html").is_file()
    [curve] = (tmp_path / "run" / "artifacts").glob("train-*/metrics.jsonl")
    assert f'"step": {STEPS},' in curve.read_text()
