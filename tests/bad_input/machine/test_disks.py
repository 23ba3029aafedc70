"""Directories and disks that do not let a run work: no permission, no room."""

import contextlib
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

from data.embedded.target import EmbeddedTarget
from tests.bad_input.commands import MAIN, Case, run_command
from tests.bad_input.faults import protected, read_only, small_disk
from tests.bad_input.machine.machines import (
    SERVE,
    SUBMIT,
    WORK,
    CheckMachine,
    Fault,
    Machine,
    each_machine,
)
from tests.train.small_run import arguments

KEPT = "output_dir=kept/run"
TEXTS = "stages=[data,vocab,answers]"
SLURM = ("--gpus-per-node=0",)


def forbidden(directory: Path) -> AbstractContextManager[object]:
    (directory / "kept").mkdir()
    return protected(directory / "kept")


def mounted_read_only(directory: Path) -> AbstractContextManager[object]:
    (directory / "kept").mkdir()
    return read_only(directory / "kept")


@contextlib.contextmanager
def unreadable(directory: Path) -> Iterator[None]:
    (directory / "kept").mkdir()
    rows = directory / "kept" / "rows.jsonl"
    rows.write_text("{}\n")
    rows.chmod(0)
    with protected(directory / "kept"):
        yield


@contextlib.contextmanager
def full(directory: Path) -> Iterator[None]:
    with small_disk(directory / "kept", 1 << 16):
        (directory / "kept" / "fill").write_bytes(bytes(1 << 16))
        yield


def disk_of(num_bytes: int) -> Fault:
    return lambda directory: small_disk(directory / "kept", num_bytes)


MACHINES = [
    # permission
    Machine(
        Case("output_of_another", (KEPT,), ("output_dir=kept/run", "Permission denied"), absent=WORK),
        forbidden,
    ),
    Machine(
        Case("output_read_only", (KEPT,), ("output_dir=kept/run", "Read-only file system")), mounted_read_only
    ),
    Machine(Case("output_disk_full", (KEPT,), ("output_dir=kept/run", "No space left on device")), full),
    Machine(
        Case(
            "spool_of_another", ("capture.spool_dir=kept",), ("capture.spool_dir=kept: ", "Permission denied")
        ),
        forbidden,
    ),
    Machine(
        Case(
            "cache_of_another_and_a_target_to_train",
            ("target.model=embedded", "cache_dir=kept/cache", KEPT.replace("kept", "own")),
            ("cache_dir=kept/cache: ", "Permission denied"),
        ),
        forbidden,
    ),
    Machine(
        Case("submit_output", (KEPT, *SLURM), ("file=", "kept/run: Permission denied."), script=SUBMIT),
        forbidden,
    ),
    Machine(Case("serve_output", (KEPT,), ("output_dir=kept/run", "denied"), script=SERVE), forbidden),
    Machine(
        Case(
            "data_unreadable",
            ("data.train=kept/rows.jsonl", TEXTS),
            ("file=", "rows.jsonl: Permission denied."),
        ),
        unreadable,
    ),
    # room
    Machine(
        Case(
            "disk_too_small_to_capture",
            (KEPT, "stages=[data,vocab,answers,capture]"),
            ("output_dir=kept/run/artifacts/capture-", "The store needs", "are free; choose another disk"),
        ),
        disk_of(5 << 20),
    ),
]


@each_machine(MACHINES)
def test_what_cannot_be_written_or_read_is_one_message(machine: Machine, check_machine: CheckMachine) -> None:
    check_machine(machine)


def test_a_disk_that_fills_up_in_the_export_keeps_the_training(
    small_target: EmbeddedTarget, finished: tuple[Path, str], tmp_path: Path
) -> None:
    disk = tmp_path / "kept"
    with small_disk(disk, 200 << 20):
        shutil.copytree(finished[0], disk / "run", symlinks=True)
        for made in (disk / "run" / "artifacts").glob("e*-*"):  # export and evaluate
            shutil.rmtree(made)
        room = 1 << 17
        (disk / "fill").write_bytes(bytes(shutil.disk_usage(disk).free - room))
        settings = (*arguments(small_target, Path("kept/run")), "stages=[export]")
        outcome = run_command(MAIN, "recipe=any_target", *settings, directory=tmp_path)
        assert outcome.status != 0
        assert "No space left on device" in outcome.err
        (disk / "fill").unlink()
        outcome = run_command(MAIN, "recipe=any_target", *settings, directory=tmp_path)
        assert outcome.status == 0, outcome.err
        assert "train: reused" in outcome.out
        assert "export: done" in outcome.out
