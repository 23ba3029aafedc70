"""`gpu_check --dry-run`: two parts in every suite, all of them in the full one."""

import subprocess
from pathlib import Path

import pytest

from eagle31.json_files import read_json
from tests.train.torchrun import ROOT, environment, preloaded_python
from train.bench.gpu_check.part import PARTS


def dry_run(directory: Path, *arguments: str, seconds: float) -> tuple[subprocess.CompletedProcess, dict]:
    command = [preloaded_python(), "scripts/gpu_check", "--dry-run", "--output", str(directory), *arguments]
    done = subprocess.run(
        command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=seconds
    )
    numbers = directory / "gpu_check.json"
    assert numbers.exists(), done.stderr
    return done, {one["name"]: one for one in read_json(numbers)["parts"]}


def test_a_dry_run_of_two_parts(tmp_path: Path) -> None:
    done, found = dry_run(tmp_path, "--parts", "environment", "parity", seconds=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert list(found) == ["environment", "parity"]
    names = {one["name"] for one in found["environment"]["figures"]}
    assert names >= {"torch", "transformers", "deepspeed", "vLLM", "processor"}
    assert len(found["parity"]["checks"]) == 12
    assert "2 passed, 0 failed, 0 not run" in done.stdout
    assert "2 passed, 0 failed, 0 not run" in (tmp_path / "index.html").read_text()


@pytest.mark.full("all parts take as long as a run")
@pytest.mark.timeout(7200)
def test_a_dry_run_walks_through_all_parts(tmp_path: Path, vllm_python: Path) -> None:
    done, found = dry_run(tmp_path, seconds=7000)
    assert list(found) == [part.name for part in PARTS]
    failed = {name: one["error"] or one["checks"] for name, one in found.items() if one["status"] != "passed"}
    assert not failed
    assert done.returncode == 0
