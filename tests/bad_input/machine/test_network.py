"""Ports that are in use, and servers of somebody else."""

import contextlib
import json
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import pytest

from data.capture.vllm import client
from tests.bad_input.commands import Case
from tests.bad_input.faults import answering, free_port, port_in_use
from tests.bad_input.machine.machines import (
    PORT,
    SERVE,
    WORK,
    CheckMachine,
    Fault,
    Machine,
    each_machine,
)
from tests.data.capture.vllm.servers import INFO
from train.engines import probe

CAPTURES = ("capture=vllm", "stages=[data,vocab,answers,capture]")
SERVED = (f"vllm.servers=[http://127.0.0.1:{PORT}]", *CAPTURES)
NAMED = ("error: vllm.servers=http://127.0.0.1:", PORT)


def used(directory: Path) -> AbstractContextManager[object]:
    return port_in_use()


def none(directory: Path) -> AbstractContextManager[object]:
    return contextlib.nullcontext(free_port())


def served(status: int, body: bytes) -> Fault:
    return lambda directory: answering(status, body)


OTHER = json.dumps(replace(INFO, model="org/other", target_fingerprint="0123").to_json()).encode()

MACHINES = [
    # ports
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
        Case("server_of_another_target", SERVED, (*NAMED, "Its target is org/other, not "), absent=WORK),
        served(200, OTHER),
    ),
    Machine(
        Case("server_of_another_version", SERVED, ("no server info of this version",), absent=WORK),
        served(200, b"[]"),
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


@each_machine(MACHINES)
def test_what_cannot_be_used_is_one_message(
    machine: Machine, check_machine: CheckMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "PATIENCE_SECONDS", 0.5)
    monkeypatch.setattr(probe, "_PAUSE_SECONDS", 0.1)
    monkeypatch.setattr(client, "_INFO_SECONDS", 0.3)
    check_machine(machine)
