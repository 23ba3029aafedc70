"""Runs of the quickstart: their commands, their directories, and what they leave."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from data.embedded.target import EmbeddedTarget, ensure_embedded_target
from data.locks import try_lock
from eagle31.json_files import read_json, read_jsonl
from train.bench.gpu_check.record import NotRun, Options
from train.bench.gpu_check.runner import ROOT, end_session
from train.config.compose import composed
from train.pipeline import LOCK_FILE

_FREE_SECONDS = 30.0
QUICKSTART = "quickstart"  # the directory that later parts read
_BF16_TARGET = ("target.dtype=bfloat16", "export.dtype=bfloat16")
_SMALL = (
    "capture.max_samples=120",
    "data.max_tokens=192",
    "data.num_validation=8",
    "data.num_test=4",
    "drafter.draft_vocab_size=512",
    "train.row_tokens=256",
    "train.ttt_steps=3",
    "train.max_steps=24",
    "train.log_every=1",
    "train.validate_every=8",
    "train.save_every=8",
    "evaluate.max_new_tokens=24",
    "evaluate.sampling=false",
)


class RunFailed(RuntimeError):
    """A run did not end as expected."""


def command(options: Options, directory: Path, *overrides: str, num_processes: int = 1) -> list[str]:
    """Return the command of a quickstart in bf16 with ZeRO 1; on a GPU the target is in bf16, too."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    recipe = ["recipe=quickstart", "deepspeed=zero1", "deepspeed.precision=bf16"]
    return [
        *(*launcher, "--nproc-per-node", str(num_processes), "train/main.py", *recipe),
        *(_BF16_TARGET if options.num_gpus else ()),
        *(_SMALL if options.dry_run else ()),
        *(f"output_dir={directory}", *overrides),
    ]


def start(line: Sequence[str]) -> subprocess.Popen:
    """Start a run in its own session. Its output goes to this process's."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled"}
    print("$", *line, flush=True)
    return subprocess.Popen(line, cwd=ROOT, env=environment, start_new_session=True)


def finish(line: Sequence[str]) -> float:
    """Run to the end and return the seconds; the run ends with this process.

    Raises:
        RunFailed: its status is not 0.
    """
    started = time.monotonic()
    process = start(line)
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    try:
        status = process.wait()
    finally:
        end_session(process)
        signal.signal(signal.SIGTERM, before)
    if status:
        raise RunFailed(f"The run ended with status {status}; its messages are in the log.")
    return time.monotonic() - started


def kill_after(line: Sequence[str], directory: Path, step: int) -> int:
    """Start a run, kill all its processes once it has logged `step`, and return the last step in its log.

    Raises:
        RunFailed: it ended before.
    """
    process = start(line)
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    try:
        while last_step(directory) < step:
            if process.poll() is not None:
                raise RunFailed(f"The run ended with status {process.returncode} before step {step}.")
            time.sleep(0.05)
        # torchrun's workers lead sessions of their own.
        run = psutil.Process(process.pid)
        processes = [run, *run.children(recursive=True)]
        for one in processes:
            one.kill()
        psutil.wait_procs(processes)
    finally:
        end_session(process)
        signal.signal(signal.SIGTERM, before)
    _wait_until_free(directory)
    return last_step(directory)


def _wait_until_free(directory: Path) -> None:
    """Wait until no process of a killed run holds the lock of its directory."""
    deadline = time.monotonic() + _FREE_SECONDS
    while (lock := try_lock(directory / LOCK_FILE)) is None:
        if time.monotonic() > deadline:
            raise RunFailed(f"A process of the killed run is still there after {_FREE_SECONDS:.0f} s.")
        time.sleep(0.05)
    lock.close()


def last_step(directory: Path) -> int:
    return max((record["step"] for record in training_records(directory)), default=0)


def training_records(directory: Path) -> list[dict[str, Any]]:
    """Return the training records of a run's metrics.jsonl; none if it has none yet."""
    paths = list(directory.glob("artifacts/train-*/metrics.jsonl"))
    return [one for path in paths for one in read_jsonl(path) if one["kind"] == "train"]


def captured_copy(options: Options, name: str, *left_out: str) -> Path:
    """Return a directory with the quickstart's artifacts from before training, as hard links.

    Args:
        left_out: stages whose artifacts are left out, too.

    Raises:
        NotRun: the quickstart has not captured anything.
    """
    source, directory = options.directory / QUICKSTART, options.directory / name
    if not list(source.glob("artifacts/capture-*")):
        raise NotRun("It needs what the part 'quickstart' captures, which there is not.")
    shutil.rmtree(directory, ignore_errors=True)
    for path in sorted(source.glob("artifacts/*")):
        stage = path.name.partition("-")[0]
        if stage in ("data", "vocab", "answers", "capture") and stage not in left_out:
            shutil.copytree(path, directory / "artifacts" / path.name, copy_function=os.link)
    return directory


def store_of(directory: Path) -> Path:
    """Return the directory of the training samples' store."""
    [path] = directory.glob("artifacts/capture-*/train")
    return path


def evaluation_of(directory: Path) -> dict[str, Any]:
    [path] = directory.glob("artifacts/evaluate-*/evaluation.json")
    found: dict[str, Any] = read_json(path)
    return found


def finished_export(options: Options) -> Path:
    """Return the quickstart's export.

    Raises:
        NotRun: there is none.
    """
    export = options.directory / QUICKSTART / "export"
    if not (export / "config.json").exists():
        raise NotRun("It needs the export of the part 'quickstart', which there is not.")
    return export


def quickstart_target() -> EmbeddedTarget:
    """Return the target that the quickstart has trained."""
    cache = Path(composed(["recipe=quickstart"]).cache_dir)
    return ensure_embedded_target(cache / "embedded", progress=False)
