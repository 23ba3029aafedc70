"""Capture through a server, as the capture stage does it."""

import os
from collections.abc import Generator, Sequence
from contextlib import closing
from pathlib import Path

from datasets import Dataset

from data.capture.arriving import ArrivingStates
from data.capture.dispatch import PATIENCE_SECONDS
from data.capture.filling import StoreSpec, fill_store
from data.capture.producer import EngineProducer
from data.capture.transport.spool import file_bytes, open_spool
from data.capture.vllm.capture_request import capture_tasks
from data.capture.vllm.client import ExpectedStates, VllmClient, check_states
from data.capture.vllm.server_info import ServerInfo
from data.capture.vllm.server_process import ServerProcess
from data.samples import CapturedSample, StateShape

KEY = "the-key-of-this-test"
START_SECONDS, STALL_SECONDS = 1000.0, 300.0
CODEC = "exact"


def server_process(command_line: Sequence[str], log: Path, stall_seconds: float) -> ServerProcess:
    """Start a server on this machine, on a port that it chooses."""
    return ServerProcess(
        command_line,
        host="127.0.0.1",
        port=None,
        key=KEY,
        devices=None,
        log=log,
        limit_seconds=START_SECONDS,
        stall_seconds=stall_seconds,
    )


def capture_store(
    client: VllmClient,
    dataset: Dataset,
    directory: Path,
    expected: ExpectedStates,
    root: Path,
    patience_seconds: float = PATIENCE_SECONDS,
    spool_gb: float = 0.01,
) -> None:
    """Fill a store through a server, as the capture stage does; the spool is in `root`."""
    shape = StateShape(len(expected.aux_layer_ids), expected.hidden_size, expected.dtype)
    longest = max(map(len, dataset["input_ids"]))

    def check(client: VllmClient, info: ServerInfo) -> None:
        check_states(client, info, expected, longest)

    def captured(
        _: Sequence[int], missing: Sequence[int]
    ) -> Generator[tuple[int, CapturedSample | str], None, None]:
        with (
            open_spool(root, f"test-{os.getpid()}", CODEC, int(spool_gb * 1e9)) as spool,
            closing(EngineProducer([client], capture_tasks(spool), check, patience_seconds)) as producer,
        ):
            source = ArrivingStates(
                dataset,
                producer,
                spool,
                shape=shape,
                sample_bytes=lambda mask: file_bytes(CODEC, mask, *vars(shape).values()),
                spool_gb=spool_gb,
                name="test",
                checks_refused=False,
            )
            yield from source.captured(missing)

    store = StoreSpec(directory, dataset, CODEC)
    fill_store(store, captured, expected, shard_tokens=500, manifest_fields={"target": "tiny"})
