"""Machines that do not let a run work: no permission, no room, ports in use, servers of somebody else."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from data.embedded.target import EmbeddedTarget
from data.vllm import server
from data.vllm.capture_request import PARAMS
from data.vllm.server_info import ServerInfo
from tests.bad_input.commands import MAIN, ROOT, Case, CheckCase, run_command
from tests.bad_input.faults import answering, free_port, port_in_use, protected, read_only, small_disk
from tests.train.small_run import arguments
from train.inference import probe

Fault = Callable[[Path], AbstractContextManager[object]]

PORT = "{port}"  # the port of the fault, in arguments and messages
TEXTS = "stages=[data,vocab,answers]"
CAPTURES = ("capture=vllm", "stages=[data,vocab,answers,capture]")
SERVED = (f"vllm.servers=[http://127.0.0.1:{PORT}]", *CAPTURES)
NAMED = ("error: vllm.servers=http://127.0.0.1:", PORT)
WORK = ("data: ", "capture: ")  # what stages print when they begin
SERVE, SUBMIT, GPU_CHECK = "scripts/serve_target", "scripts/submit", "scripts/gpu_check"
SLURM = ("launcher=slurm", "launcher.gpus_per_node=0")


@dataclass(frozen=True)
class Machine:
    """A case, whose arguments follow those of a small run, on a machine with a fault."""

    case: Case
    fault: Fault


def forbidden(directory: Path) -> AbstractContextManager[object]:
    (directory / "kept").mkdir()
    return protected(directory / "kept")


def open_to_all(directory: Path) -> AbstractContextManager[object]:
    (directory / "kept").mkdir()
    (directory / "kept").chmod(0o777)
    return contextlib.nullcontext()


def mounted_read_only(directory: Path) -> AbstractContextManager[object]:
    (directory / "kept").mkdir()
    return read_only(directory / "kept")


@contextlib.contextmanager
def a_file(directory: Path) -> Iterator[None]:
    (directory / "kept").touch()
    yield


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


def used(directory: Path) -> AbstractContextManager[object]:
    return port_in_use()


def none(directory: Path) -> AbstractContextManager[object]:
    return contextlib.nullcontext(free_port())


def served(status: int, body: bytes, answer: bytes | None = None) -> Fault:
    return lambda directory: answering(status, body, answer)


MODELS = json.dumps({"data": [{"id": "gpt"}]}).encode()
OTHER = ServerInfo(
    id="1",
    model="org/other",
    target_fingerprint="0123",
    aux_layer_ids=(1, 2, 3),
    num_layers=4,
    hidden_size=64,
    dtype="float32",
    device="cpu",
    vocab_size=512,
    max_tokens=4096,
    roots=(),
)
OTHER_ANSWER = json.dumps({"kv_transfer_params": {PARAMS: OTHER.to_json()}}).encode()
KEPT = "output_dir=kept/run"

MACHINES = [
    # permission
    Machine(
        Case(
            "output_of_another", (KEPT,), ("lacking", "output_dir=kept/run", "Permission denied"), absent=WORK
        ),
        forbidden,
    ),
    Machine(
        Case("output_read_only", (KEPT,), ("output_dir=kept/run", "Read-only file system")), mounted_read_only
    ),
    Machine(Case("output_is_a_file", ("output_dir=kept",), ("output_dir=kept", "kept is a file")), a_file),
    Machine(Case("output_below_a_file", (KEPT,), ("output_dir=kept/run", "kept is a file")), a_file),
    Machine(Case("output_disk_full", (KEPT,), ("output_dir=kept/run", "No space left on device")), full),
    Machine(
        Case(
            "spool_of_another", ("capture.spool_dir=kept",), ("capture.spool_dir=kept: ", "Permission denied")
        ),
        forbidden,
    ),
    Machine(
        Case(
            "spool_of_all",
            ("capture.spool_dir=kept",),
            ("capture.spool_dir=kept: ", "every account"),
            absent=WORK,
        ),
        open_to_all,
    ),
    Machine(
        Case("store_cache_of_another", ("capture.cache_dir=kept",), ("capture.cache_dir=kept: ", "denied")),
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
        Case("find_lr_output", (KEPT,), ("output_dir=kept/run", "denied"), script="scripts/find_lr"),
        forbidden,
    ),
    Machine(
        Case("submit_output", (KEPT, *SLURM), ("file=", "kept/run: Permission denied."), script=SUBMIT),
        forbidden,
    ),
    Machine(
        Case(
            "gpu_check_output",
            ("--dry-run", "--output=kept/x"),
            ("file=", "kept/x: Permission"),
            script=GPU_CHECK,
        ),
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
        Case("disk_full_in_data", (KEPT, TEXTS), ("lacking", "disk", "artifacts/data-", "The disk is full")),
        disk_of(1 << 17),
    ),
    Machine(
        Case(
            "disk_too_small_to_capture",
            (KEPT, "stages=[data,vocab,answers,capture]"),
            ("output_dir=kept/run/artifacts/capture-", "The store needs", "are free; choose another disk"),
        ),
        disk_of(5 << 20),
    ),
    # ports
    Machine(
        Case(
            "metrics_port_in_use",
            (f"capture.metrics_port={PORT}", *CAPTURES),
            (f"capture.metrics_port={PORT}: ", "Address already in use", "another port"),
            absent=WORK,
        ),
        used,
    ),
    Machine(
        Case(
            "metrics_port_too_great",
            ("capture.metrics_port=70000", *CAPTURES),
            ("capture.metrics_port=70000: ",),
        ),
        none,
    ),
    Machine(Case("serve_port_in_use", ("--port", PORT), (f"--port={PORT}: ", "in use"), script=SERVE), used),
    Machine(
        Case("serve_port_too_great", ("--port=70000",), ("--port=70000: ", "0-65535"), script=SERVE), none
    ),
    # servers
    Machine(
        Case(
            "server_that_is_down",
            SERVED,
            (
                "vllm: waiting for ",
                "No server answers",
                "lacking",
                "no answer",
                *NAMED,
                "scripts/serve_target",
            ),
            absent=WORK,
        ),
        none,
    ),
    Machine(
        Case("server_that_is_silent", SERVED, ("vllm: waiting for ", *NAMED, "did not answer"), absent=WORK),
        used,
    ),
    Machine(
        Case("server_with_another_key", SERVED, (*NAMED, "VLLM_API_KEY"), absent=WORK), served(401, b"{}")
    ),
    Machine(
        Case("server_without_connector", SERVED, (*NAMED, "without eagle31's connector"), absent=WORK),
        served(200, MODELS, b"{}"),
    ),
    Machine(
        Case("server_of_another_target", SERVED, (*NAMED, "Its target is org/other, not "), absent=WORK),
        served(200, MODELS, OTHER_ANSWER),
    ),
    Machine(
        Case("server_without_models", SERVED, (*NAMED, "It names no model."), absent=WORK), served(200, b"[]")
    ),
    Machine(
        Case("server_of_web_pages", SERVED, (*NAMED, "The answer is no JSON: <html>"), absent=WORK),
        served(200, b"<html>"),
    ),
    Machine(
        Case("server_of_something_else", SERVED, (*NAMED, "It answered 404"), absent=WORK), served(404, b"")
    ),
    Machine(
        Case(
            "server_whose_name_is_unknown",
            ("vllm.servers=[http://no.such.host.invalid:8000]", *CAPTURES),
            ("vllm.servers=http://no.such.host.invalid:8000: It did not answer",),
        ),
        none,
    ),
    Machine(
        Case("server_without_scheme", ("vllm.servers=[node1:8000]",), ("vllm.servers=node1:8000: ",)), none
    ),
    Machine(
        Case("server_port_is_a_word", ("vllm.servers=['http://n:p']",), ("vllm.servers=http://n:p: Give ",)),
        none,
    ),
]


@pytest.mark.parametrize("machine", MACHINES, ids=[one.case.name for one in MACHINES])
def test_what_the_machine_refuses_is_one_message(
    machine: Machine,
    small_target: EmbeddedTarget,
    tmp_path: Path,
    check_case: CheckCase,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(probe, "PATIENCE_SECONDS", 0.1)
    monkeypatch.setattr(probe, "FIRST_LINE_SECONDS", 0.1)
    monkeypatch.setattr(probe, "_PAUSE_SECONDS", 0.1)
    monkeypatch.setattr(server, "_NAMES_SECONDS", 0.3)
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    case = machine.case
    first = {MAIN: ("recipe=any_target",), SUBMIT: ("recipe=any_target",), GPU_CHECK: ()}.get(
        case.script, ("any_target",)
    )
    settings = [] if case.script == GPU_CHECK else arguments(small_target, Path("run"))
    with machine.fault(tmp_path) as port:
        known = [one.replace(PORT, str(port)) for one in (*first, *settings, *case.arguments)]
        says = tuple(one.replace(PORT, str(port)) for one in case.says)
        check_case(replace(case, arguments=tuple(known), says=says))


def test_a_disk_that_fills_up_in_the_export_keeps_the_training(
    small_target: EmbeddedTarget, finished: tuple[Path, str], tmp_path: Path, check_case: CheckCase
) -> None:
    disk = tmp_path / "kept"
    with small_disk(disk, 200 << 20):
        shutil.copytree(finished[0], disk / "run", symlinks=True)
        for made in (disk / "run" / "artifacts").glob("e*-*"):  # export and evaluate
            shutil.rmtree(made)
        room = 1 << 17
        (disk / "fill").write_bytes(bytes(shutil.disk_usage(disk).free - room))
        settings = (*arguments(small_target, Path("kept/run")), "stages=[export]")
        said = ("output_dir=kept/run/artifacts/export-", "The disk is full", "finished work is kept")
        check_case(Case("full", ("recipe=any_target", *settings), said))
        (disk / "fill").unlink()
        outcome = run_command(MAIN, "recipe=any_target", *settings, directory=tmp_path)
        assert outcome.status == 0, outcome.err
        assert "train: reused" in outcome.out
        assert "export: done" in outcome.out


def commands() -> list[str]:
    """Return the commands that need the environment; those in scripts/setup make it."""
    tracked = subprocess.run(
        ["git", "ls-files", "scripts"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    found = [
        name
        for name in tracked.stdout.split()
        if not name.startswith("scripts/setup/")
        and (ROOT / name).read_text().startswith("#!/usr/bin/env python3")
    ]
    assert len(found) > 20
    return found


def test_commands_outside_the_environment_say_how_to_activate_it(tmp_path: Path) -> None:
    started = {
        name: subprocess.Popen(
            [sys.executable, "-I", "-S", str(ROOT / name)],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for name in (*commands(), MAIN)
        if not name.startswith("scripts/setup/")  # they make environments
    }
    for name, process in started.items():
        out, err = process.communicate(timeout=60)
        if name == "scripts/doctor":
            assert (process.returncode, err) == (1, ""), name
            assert "lacking" in out
            assert "packages" in out
        else:
            assert process.returncode == 2, (name, err)
            assert err.startswith("error: package="), (name, err)
            assert "run `source .venv/bin/activate`" in err
            assert len(err.splitlines()) == 1, (name, err)
    assert os.listdir(tmp_path) == []
