"""Runs of the quickstart in bf16 with ZeRO 1, and what they leave."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from eagle31.json_files import read_json, read_jsonl

ROOT = Path(__file__).resolve().parents[2]
TO_TRAINING = "stages=[data,vocab,answers,capture,train]"
SAVE_EVERY = 8
_BF16_TARGET = ("target.dtype=bfloat16", "export.dtype=bfloat16")
_SMALL = (
    "data.max_samples=120",
    "data.max_tokens=192",
    "data.num_validation=8",
    "data.num_test=4",
    "drafter.draft_vocab_size=512",
    "train.row_tokens=256",
    "train.ttt_steps=3",
    "train.max_steps=24",
    "train.log_every=1",
    "train.validate_every=8",
    "evaluate.max_new_tokens=24",
)


@dataclass(frozen=True)
class Check:
    """Where the tests leave their runs, and the device that they run on. On a CPU all sizes are small."""

    output: Path
    device: torch.device

    @property
    def small(self) -> bool:
        return self.device.type == "cpu"

    @property
    def quickstart(self) -> Path:
        return self.output / "quickstart"

    def command(self, directory: Path, *overrides: str, num_processes: int = 1) -> list[str]:
        """Return the command of a run."""
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        return [
            *(*launcher, "--nproc-per-node", str(num_processes), "train/main.py", "recipe=quickstart"),
            *(
                "deepspeed.zero_stage=1",
                "deepspeed.precision=bf16",
                f"train.save_every={SAVE_EVERY}",
                "train.rows_per_step=2",
            ),
            *(_SMALL if self.small else _BF16_TARGET),
            *(f"output_dir={directory}", *overrides),
        ]

    def captured_copy(self, name: str, *left_out: str) -> Path:
        """Return a directory with the quickstart's artifacts from before training, as hard links."""
        directory = self.output / name
        shutil.rmtree(directory, ignore_errors=True)
        for path in sorted(self.quickstart.glob("artifacts/*")):
            stage = path.name.partition("-")[0]
            if stage in {"data", "vocab", "answers", "capture"} - set(left_out):
                shutil.copytree(path, directory / "artifacts" / path.name, copy_function=os.link)
        return directory


def run(line: Sequence[str]) -> float:
    """Run a command to its end, and return the seconds."""
    started = time.monotonic()
    done = subprocess.run(
        line, cwd=ROOT, env=_environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert done.returncode == 0, done.stdout.decode(errors="replace")[-3000:]
    return time.monotonic() - started


def kill_after(line: Sequence[str], directory: Path, step: int) -> None:
    """Start a run, and kill all its processes once it has logged `step`."""
    process = subprocess.Popen(
        line, cwd=ROOT, env=_environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    while max(losses(directory), default=0) < step:
        assert process.poll() is None, f"it ended with status {process.returncode} before step {step}"
        time.sleep(0.05)
    run = psutil.Process(process.pid)
    processes = [run, *run.children(recursive=True)]
    for one in processes:
        one.kill()
    psutil.wait_procs(processes)


def _environment() -> dict[str, str]:
    return os.environ | {"HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled"}


def losses(directory: Path) -> dict[int, float]:
    """Return the training loss by step, as far as it is logged."""
    return {one["step"]: one["loss"] for one in training_records(directory)}


def training_records(directory: Path) -> list[dict[str, Any]]:
    paths = list(directory.glob("artifacts/train-*/metrics.jsonl"))
    return [one for path in paths for one in read_jsonl(path) if one["kind"] == "train"]


def evaluation_of(directory: Path) -> dict[str, Any]:
    [path] = directory.glob("artifacts/evaluate-*/evaluation.json")
    found: dict[str, Any] = read_json(path)
    return found
