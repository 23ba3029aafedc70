"""Machines that do not let a run work: no permission, no room, ports in use, servers of somebody else."""

import contextlib
import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from data.capture.vllm import client
from data.embedded.target import EmbeddedTarget
from tests.bad_input.commands import Case, CheckCase
from tests.bad_input.faults import answering, port_in_use, small_disk
from tests.data.capture.vllm.servers import INFO
from tests.processes import free_ports
from tests.train.small_run import arguments
from train.engines import probe

PORT = "{port}"  # the port of the fault, in arguments and messages
SERVE = "scripts/serve_target"
WORK = ("data: ", "capture: ")  # what stages print when they begin
KEPT = "output_dir=kept/run"
SERVED = (
    f"vllm.servers=[http://127.0.0.1:{PORT}]",
    "capture=vllm",
    "stages=[data,vocab,answers,capture]",
)
NAMED = ("error: vllm.servers=http://127.0.0.1:", PORT)
OTHER = json.dumps(replace(INFO, model="org/other", target_fingerprint="0123").to_json()).encode()


@dataclass(frozen=True)
class Machine:
    """A case, whose arguments follow those of a small run, on a machine that has a fault meanwhile."""

    case: Case
    fault: Callable[[Path], AbstractContextManager[object]]


MACHINES = [
    Machine(
        Case(
            "disk_too_small_to_capture",
            (KEPT, "stages=[data,vocab,answers,capture]"),
            ("output_dir=kept/run/artifacts/capture-", "The store needs", "another disk"),
        ),
        lambda directory: small_disk(directory / "kept", 5 << 20),
    ),
    Machine(
        Case("serve_port_in_use", ("--port", PORT), (f"--port={PORT}: ", "in use"), script=SERVE),
        lambda _: port_in_use(),
    ),
    Machine(
        Case(
            "server_that_is_down",
            SERVED,
            ("vllm: waiting for ", "No server answers", *NAMED, "scripts/serve_target"),
            absent=WORK,
        ),
        lambda _: contextlib.nullcontext(free_ports(1)[0]),
    ),
    Machine(
        Case("server_with_another_key", SERVED, (*NAMED, "VLLM_API_KEY"), absent=WORK),
        lambda _: answering(401),
    ),
    Machine(
        Case("server_of_another_target", SERVED, (*NAMED, "org/other"), absent=WORK),
        lambda _: answering(200, OTHER),
    ),
    Machine(
        Case("server_of_web_pages", SERVED, (*NAMED, "no JSON"), absent=WORK),
        lambda _: answering(200, b"<html>"),
    ),
]


@pytest.mark.parametrize("machine", MACHINES, ids=[one.case.name for one in MACHINES])
def test_what_cannot_be_used_is_one_message(
    machine: Machine,
    small_target: EmbeddedTarget,
    tmp_path: Path,
    check_case: CheckCase,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    monkeypatch.setattr(probe, "PATIENCE_SECONDS", 0.5)
    monkeypatch.setattr(probe, "_PAUSE_SECONDS", 0.1)
    monkeypatch.setattr(client, "_INFO_SECONDS", 0.3)
    case = machine.case
    with machine.fault(tmp_path) as port:
        known = ["recipe=any_target", *arguments(small_target, Path("run")), *case.arguments]
        given = tuple(one.replace(PORT, str(port)) for one in known)
        says = tuple(one.replace(PORT, str(port)) for one in case.says)
        check_case(replace(case, arguments=given, says=says))
