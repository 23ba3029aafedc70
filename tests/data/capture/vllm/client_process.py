"""A run in a separate process that a test kills: TARGET ROOT AUX_LAYER_IDS NUM_SAMPLES [SERVER].

It captures through the server, or through one that it starts and that prefills as the test's target needs.
"""

import json
import os
import sys
from collections.abc import Generator, Sequence
from contextlib import closing
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[4]))

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
from data.store.codec import Encoding
from data.target.spec import TargetSpec
from tests.data.capture.vllm.targets import START_SECONDS, capture_engine, expected_states, make_samples

KEY = "the-key-of-this-test"
ENCODING = Encoding("exact", "all")


def capture_store(
    client: VllmClient,
    dataset: Dataset,
    directory: Path,
    expected: ExpectedStates,
    root: Path,
    patience_seconds: float = PATIENCE_SECONDS,
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
            open_spool(root, f"test-{os.getpid()}", ENCODING, 10**7) as spool,
            closing(EngineProducer([client], capture_tasks(spool), check, patience_seconds)) as producer,
        ):
            source = ArrivingStates(
                dataset,
                producer,
                spool,
                shape=shape,
                sample_bytes=lambda mask: file_bytes(ENCODING, mask, *vars(shape).values()),
                spool_gb=0.01,
                name="test",
                checks_refused=False,
            )
            yield from source.captured(missing)

    store = StoreSpec(directory, dataset, ENCODING)
    fill_store(store, captured, expected, shard_tokens=500, manifest_fields={"target": "tiny"})


if __name__ == "__main__":
    target, root, ids, num_samples, *server = sys.argv[1:]
    spec, aux_layer_ids = TargetSpec(target), tuple(json.loads(ids))
    if server:
        client = VllmClient(server[0], concurrency=2)
    else:
        process = ServerProcess(
            capture_engine(spec, aux_layer_ids, Path(root)).command_line(),
            host="127.0.0.1",
            port=None,
            key=KEY,
            devices=None,
            log=Path(root) / "server.log",
            limit_seconds=START_SECONDS,
        )
        process.wait_until_ready(progress=True)
        client = VllmClient(process.url, concurrency=4, key=KEY, check=process.check)
    capture_store(
        client,
        make_samples(int(num_samples)),
        Path(root) / "store",
        expected_states(spec, aux_layer_ids),
        Path(root),
    )
