"""What a process needs to join a Mooncake store, and its address there."""

import socket

import pytest

from data.addresses import outward_address
from data.capture.torchspec.mooncake import reach


def test_a_machine_whose_name_is_a_loopback_address_gives_others_another_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    look_up = socket.getaddrinfo
    monkeypatch.setattr(
        socket,
        "getaddrinfo",
        lambda host, *more: look_up("127.0.0.1" if host == "node7" else host, *more),
    )
    with socket.create_server(("127.0.0.1", 0)) as master:
        port = master.getsockname()[1]
        assert reach(f"127.0.0.1:{port}") == reach(f"localhost:{port}") == "127.0.0.1"
        if outward_address() is None:
            pytest.skip("this machine has no network")
        assert reach(f"node7:{port}") == outward_address() != "127.0.0.1"
