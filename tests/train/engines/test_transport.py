"""Where states wait on their way from vLLM's servers."""

from pathlib import Path

import pytest

from data.capture.transport.spool import MEMORY
from train.config.capture import CaptureConfig, CaptureSource
from train.config.run import RunConfig, states_directory
from train.config.vllm import VllmConfig
from train.engines.servers import server_roots

OUTPUT = Path("/shared/run")


def spool_dir(servers: list[str], **settings: object) -> Path | None:
    capture = CaptureConfig(source=CaptureSource.vllm, **settings)  # type: ignore[arg-type]
    config = RunConfig(capture=capture, vllm=VllmConfig(servers=servers), output_dir=str(OUTPUT))
    found = states_directory(config)
    # Whoever starts a server for this recipe, with or without the run's other settings, it may write there.
    assert found is None or any(found.is_relative_to(root) for root in server_roots(capture, OUTPUT))
    return found


@pytest.mark.parametrize(
    ("servers", "given", "directory"),
    [
        ([], None, MEMORY),
        (["http://127.0.0.1:8000", "http://localhost:8001"], None, MEMORY),
        (["http://127.0.0.1:8000", "http://node1:8000"], None, OUTPUT / "spool"),
        (["http://node1:8000"], "/fast", Path("/fast")),
    ],
)
def test_states_wait_where_servers_and_ranks_reach_them(
    servers: list[str], given: str | None, directory: Path
) -> None:
    assert spool_dir(servers, spool_dir=given) == directory
