"""A client of the load test: `SETTINGS_JSON NAME KIND`. It works in rounds until it is told to stop.

In a round it captures every sample, checks the result, and appends a line to `NAME.jsonl`. A client that is
started again continues with the round that it had begun.
"""

import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import astuple
from pathlib import Path

import torch
from datasets import Dataset

from data.capture.drain import drain_to_store
from data.capture.online import OnlineStates, StateShape
from data.capture.opening import StoreSpec
from data.samples import CapturedSample
from data.store import HiddenStateStore
from data.store.shards import FinishedShards
from data.transport.spool import file_bytes, open_spool
from data.vllm.client import ExpectedStates, capture_through_vllm, check_server
from data.vllm.producer import VllmProducer
from data.vllm.server import VllmServer
from eagle31.json_files import append_jsonl, read_jsonl
from train.bench.capture_load.inputs import (
    ENCODING,
    MANIFEST_FIELDS,
    MAX_TOKENS,
    SHARD_TOKENS,
    SPOOL_GB,
    LoadSettings,
    expected_states,
    make_samples,
)

PATIENCE_SECONDS = 1200.0


class Client:
    """One client process.

    Args:
        name: the name of the client, which its successor has as well.
    """

    def __init__(self, settings: LoadSettings, name: str) -> None:
        self.settings, self.name = settings, name
        self.directory = settings.client_directory(name)
        self.log = Path(settings.work) / f"{name}.jsonl"
        self.dataset: Dataset = make_samples(settings.num_samples)
        self.expected: ExpectedStates = expected_states(settings.spec)

    def endpoints(self) -> list[VllmServer]:
        return [VllmServer(url, self.settings.concurrency) for url in self.settings.urls]

    def capture(self, round_number: int) -> None:
        """Have the servers write a store."""
        directory = self.directory / f"round-{round_number}"
        capture_through_vllm(
            [StoreSpec(directory, self.dataset, ENCODING)],
            self.expected,
            self.endpoints(),
            shard_tokens=SHARD_TOKENS,
            manifest_fields=MANIFEST_FIELDS,
            patience_seconds=PATIENCE_SECONDS,
        )
        self._check_store(directory, round_number)

    def write(self, round_number: int) -> None:
        """Write a store of what the servers deliver through a spool."""
        directory = self.directory / f"round-{round_number}"
        with self._online() as source:
            drain_to_store(
                StoreSpec(directory, self.dataset, ENCODING),
                source,
                self.expected,
                shard_tokens=SHARD_TOKENS,
                manifest_fields=MANIFEST_FIELDS,
            )
        self._check_store(directory, round_number)

    def train(self, round_number: int) -> None:
        """Read every sample once, as a trainer does."""
        part = self.directory / f"round-{round_number}.jsonl"
        part.parent.mkdir(parents=True, exist_ok=True)
        read = read_jsonl(part) if part.exists() else []
        missing = sorted(set(range(len(self.dataset))) - {one["sample"] for one in read})
        reference = HiddenStateStore(self.settings.reference)
        with self._online() as source:
            source.expect(missing)
            for index in missing:
                [sample] = source.get_many([index])
                assert len(sample.input_ids), f"sample {index} was refused: {source.refused}"
                line = {"sample": index, "difference": difference(sample, reference[index])}
                append_jsonl(part, line)
                read.append(line)
        largest = max(one["difference"] for one in read)
        self._finish(round_number, [one["sample"] for one in read], 0, largest)

    def _check_store(self, directory: Path, round_number: int) -> None:
        store, reference = HiddenStateStore(directory), HiddenStateStore(self.settings.reference)
        store.verify()
        num_written = sum(len(record.sample_ids) for record in FinishedShards(directory).records())
        largest = max(difference(store[i], reference[i]) for i in range(len(store)))
        ids = [int(sample_id) for sample_id in store.sample_ids]
        self._finish(round_number, ids, num_written - len(ids), largest)
        shutil.rmtree(directory)

    def _finish(self, round_number: int, ids: list[int], num_duplicates: int, largest: float) -> None:
        """Append the round's line. `ids` are the samples that it has, each as often as it has it."""
        line = {
            "round": round_number,
            "exactly_once": sorted(ids) == list(range(len(self.dataset))),
            "num_samples": len(ids),
            "duplicates_dropped": num_duplicates,
            "largest_difference": largest,
        }
        append_jsonl(self.log, line)

    @contextmanager
    def _online(self) -> Iterator[OnlineStates]:
        expected = self.expected
        shape = StateShape(len(expected.aux_layer_ids), expected.hidden_size, expected.dtype)
        base = self.directory / "spool"
        base.mkdir(parents=True, exist_ok=True)
        with open_spool(base, self.name, ENCODING, int(SPOOL_GB * 1e9)) as spool:
            producer = VllmProducer(
                self.endpoints(),
                spool,
                lambda endpoint, info: check_server(endpoint, info, expected, spool.directory, MAX_TOKENS),
                PATIENCE_SECONDS,
            )
            with closing(producer):
                yield OnlineStates(
                    self.dataset,
                    producer,
                    spool,
                    shape=shape,
                    sample_bytes=lambda mask: file_bytes(ENCODING, mask, *astuple(shape)),
                    spool_gb=SPOOL_GB,
                    name=self.name,
                )


def difference(sample: CapturedSample, reference: CapturedSample) -> float:
    """Return the largest difference of the states, relative to the largest; infinity for other tokens."""
    if not (sample.input_ids.equal(reference.input_ids) and sample.loss_mask.equal(reference.loss_mask)):
        return float("inf")
    pairs = [
        (sample.aux_hidden_states, reference.aux_hidden_states),
        (sample.final_hidden_states, reference.final_hidden_states),
    ]
    return max(float((ours - theirs).abs().max() / theirs.abs().max()) for ours, theirs in pairs)


def end_with(parent: int) -> None:
    """End this process when its parent has ended."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def main() -> None:
    threading.Thread(target=end_with, args=(os.getppid(),), daemon=True).start()
    content, name, kind = sys.argv[-3:]
    settings = LoadSettings(**json.loads(content))
    torch.set_num_threads(1)
    client = Client(settings, name)
    rounds: dict[str, Callable[[int], None]] = {
        "capture": client.capture,
        "trainer": client.train,
        "writer": client.write,
    }
    num_finished = len(read_jsonl(client.log)) if client.log.exists() else 0
    (Path(settings.work) / f"{name}.begun").touch()
    while not settings.stop_file.exists():
        rounds[kind](num_finished)
        num_finished += 1


if __name__ == "__main__":
    main()
