"""Machines that do not let a run work: no room, ports in use, servers of somebody else."""

import contextlib
import json
from dataclasses import replace
from pathlib import Path

import pytest

from data.capture.vllm import client
from data.embedded.target import EmbeddedTarget
from tests.bad_input.commands import PORT, Case, each
from tests.bad_input.faults import answering, port_in_use, small_disk
from tests.data.capture.vllm.servers import INFO
from tests.processes import free_ports
from tests.train.small_run import arguments
from train.engines import probe

WORK = ("data: ", "capture: ")  # what stages print when they begin
SERVED = (
    f"vllm.servers=[http://127.0.0.1:{PORT}]",
    "capture=vllm",
    "stages=[data,vocab,answers,capture]",
)
NAMED = ("error: vllm.servers=http://127.0.0.1:", PORT)
OTHER = json.dumps(replace(INFO, model="org/other", target_fingerprint="0123").to_json()).encode()

CASES = [
    Case(
        "disk_too_small_to_capture",
        ("output_dir=kept/run", "stages=[data,vocab,answers,capture]"),
        ("output_dir=kept/run/artifacts/capture-", "The store needs", "another disk"),
        fault=lambda directory: small_disk(directory / "kept", 5 << 20),
    ),
    Case(
        "serve_port_in_use",
        ("--port", PORT),
        (f"--port={PORT}: ", "in use"),
        script="scripts/serve_target",
        fault=lambda _: port_in_use(),
    ),
    Case(
        "server_that_is_down",
        SERVED,
        ("vllm: waiting for ", "No server answers", *NAMED, "scripts/serve_target"),
        absent=WORK,
        fault=lambda _: contextlib.nullcontext(free_ports(1)[0]),
    ),
    Case(
        "server_with_another_key",
        SERVED,
        (*NAMED, "VLLM_API_KEY"),
        absent=WORK,
        fault=lambda _: answering(401),
    ),
    Case(
        "server_of_another_target",
        SERVED,
        (*NAMED, "org/other"),
        absent=WORK,
        fault=lambda _: answering(200, OTHER),
    ),
    Case(
        "server_of_web_pages",
        SERVED,
        (*NAMED, "no JSON"),
        absent=WORK,
        fault=lambda _: answering(200, b"<html>"),
    ),
]


@each(CASES)
def test_what_cannot_be_used_is_one_message(
    case: Case, small_target: EmbeddedTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    monkeypatch.setattr(probe, "PATIENCE_SECONDS", 0.5)
    monkeypatch.setattr(probe, "_PAUSE_SECONDS", 0.1)
    monkeypatch.setattr(client, "_INFO_SECONDS", 0.3)
    case.check(tmp_path, "recipe=any_target", *arguments(small_target, Path("run")))
