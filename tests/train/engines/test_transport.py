"""The transport that a run chooses."""

from pathlib import Path

import pytest

from data.capture.transport.spool import MEMORY
from train.config.capture import CaptureConfig, TransportKind
from train.config.vllm import VllmConfig
from train.engines.servers import server_roots
from train.engines.transport import chosen_transport

OUTPUT = Path("/shared/run")


@pytest.mark.parametrize(
    ("servers", "spool_dir", "directory", "made"),
    [
        ([], None, MEMORY, False),
        (["http://127.0.0.1:8000", "http://localhost:8001"], None, MEMORY, False),
        (["http://[::1]:8000"], None, MEMORY, False),
        (["http://node1:8000"], None, OUTPUT / "spool", True),
        (["http://127.0.0.1:8000", "http://node1:8000"], None, OUTPUT / "spool", True),
        ([], "/fast", Path("/fast"), False),
        (["http://node1:8000"], "/fast", Path("/fast"), False),
    ],
)
def test_states_wait_where_servers_and_ranks_reach_them(
    servers: list[str], spool_dir: str | None, directory: Path, made: bool
) -> None:
    capture = CaptureConfig(spool_dir=spool_dir)
    chosen = chosen_transport(capture, VllmConfig(servers=servers), OUTPUT)
    assert (chosen.mooncake, chosen.spool_dir, chosen.made) == (False, directory, made)
    # Whoever starts a server for this recipe, with or without the run's other settings, it may write there.
    assert any(directory.is_relative_to(root) for root in server_roots(capture, OUTPUT))


def test_mooncake_is_taken_only_where_it_is_named() -> None:
    named = CaptureConfig(transport=TransportKind.mooncake)
    assert chosen_transport(named, VllmConfig(), OUTPUT).mooncake
    assert not chosen_transport(CaptureConfig(), VllmConfig(servers=["http://node1:8000"]), OUTPUT).mooncake
