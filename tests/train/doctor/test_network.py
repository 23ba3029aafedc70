"""Ports, and servers that are not what they should be."""

import json
import time

import pytest

from tests.bad_input.faults import answering, free_port, port_in_use
from tests.data.vllm.servers import INFO
from train.doctor.check import Check, Status
from train.doctor.network import master_port_check, port_check, server_check, servers_checks


def test_a_port_in_use_is_found() -> None:
    with port_in_use() as port:
        check = port_check("port", "launcher.port", port)
    assert (check.status, check.found) == (Status.lacking, "Address already in use")
    assert (check.field, check.value) == ("launcher.port", port)
    assert port_check("port", "launcher.port", port).status is Status.ok


def test_a_number_that_is_no_port_is_lacking() -> None:
    assert port_check("port", "launcher.port", 70000).status is Status.lacking


def test_torchrun_chooses_its_port_on_one_node_only() -> None:
    assert master_port_check({}, 1).found == "chosen by torchrun"
    assert master_port_check({}, 2).needed.endswith(":29500")
    with port_in_use() as port:
        assert master_port_check({"PET_MASTER_PORT": str(port)}, 1).status is Status.lacking


def asked(port: int) -> Check:
    [check] = servers_checks([f"http://127.0.0.1:{port}"], "org/target", [2, 4, 6], seconds=0.3)
    assert check.name == f"server 127.0.0.1:{port}"
    return check


def test_servers_that_cannot_be_used_are_lacking_within_seconds() -> None:
    started = time.monotonic()
    assert asked(free_port()).found == "no answer (Connection refused)"
    with port_in_use() as port:
        assert asked(port).found == "no answer within 0 s"
    with answering(401) as port:
        check = asked(port)
        assert (check.found, "VLLM_API_KEY" in check.remedy) == ("another key", True)
    with answering(200, json.dumps({"data": [{"id": "gpt"}]}).encode(), b"{}") as port:
        assert asked(port).found == "no server of eagle31"
    with answering(200, b"<html>") as port:
        assert asked(port).status is Status.lacking
    assert time.monotonic() - started < 30


def test_a_url_without_a_scheme_is_refused() -> None:
    [check] = servers_checks(["node1:8000"], "org/target", None)
    assert check.status is Status.lacking
    assert "http://127.0.0.1:8000" in check.remedy


@pytest.mark.parametrize(
    ("target", "layers", "status"),
    [
        ("org/target", [2, 4, 6], Status.ok),
        ("org/target", None, Status.ok),
        ("org/target", [2, 4, 5], Status.lacking),
        ("/models/target", [2, 4, 6], Status.warning),  # the run compares the weights
    ],
)
def test_a_server_runs_the_target_with_the_layers_of_the_run(
    target: str, layers: list[int] | None, status: Status
) -> None:
    check = server_check("http://node1:8000", INFO, target, layers)
    assert (check.name, check.status) == ("server node1:8000", status)
    assert check.found == "org/target, layers 2,4,6"
