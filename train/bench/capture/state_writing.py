"""Times the way of states from vLLM's cache to shards on disk, next to a plain write of as many bytes."""

import hashlib
import os
import statistics
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from data.store.codec import Encoding
from data.store.shards import FinishedShards
from data.vllm.capture_request import CaptureRequest
from data.vllm.destinations import store_destination
from data.vllm.plugin.cache_copy import CacheReader
from data.vllm.plugin.outlet import PendingWrite
from data.vllm.plugin.sink import StateSink

_BLOCK_TOKENS = 64
_WRITE_BYTES = 8 << 20
_WAIT_SECONDS = 0.001
_HASHED_BYTES = 1 << 26


@dataclass(frozen=True)
class Workload:
    """The states that are written in a round: of prompts with `num_tokens` tokens each."""

    num_samples: int
    num_tokens: int
    num_layers: int  # L: the aux layers and the last one
    hidden_size: int
    encoding: Encoding
    shard_tokens: int
    staging_bytes: int


@dataclass(frozen=True)
class Timed:
    """A side of a round."""

    num_bytes: int
    seconds: float
    cpu_seconds: float

    @property
    def gb_per_second(self) -> float:
        return self.num_bytes / self.seconds / 1e9


def compare(work: Workload, directory: Path, rounds: int) -> dict[str, Any]:
    """Time both sides in turns, in `directory`, and return the medians.

    The plain side writes as many bytes as the shards have, to one file in one thread, and syncs it.
    """
    server, store = _Server(work), directory / "store"
    capture: list[Timed] = []
    plain: list[Timed] = []
    for number in range(rounds + 1):
        written = _timed(lambda: server.capture(store))
        for path in store.glob("shard-*"):
            path.unlink()
        copied = _timed(partial(_plain_write, server.cache, written.num_bytes, directory / "plain"))
        (directory / "plain").unlink()
        if number:  # The first round touches memory that the following ones use again.
            capture.append(written)
            plain.append(copied)
    server.sink.close()
    ratios = [one.gb_per_second / other.gb_per_second for one, other in zip(capture, plain, strict=True)]
    return {
        "capture": _median(capture),
        "plain": _median(plain),
        "capture_of_plain": statistics.median(ratios),
        "rounds": ratios,
        "checksums_gb_per_cpu_second": checksum_speeds(),
    }


def checksum_speeds() -> dict[str, float]:
    """Return how fast one core computes checksums, in 10^9 bytes per second; xxh3 where it is installed."""
    content = torch.randint(256, (_HASHED_BYTES,), dtype=torch.uint8).numpy().data
    functions: dict[str, Callable[[Any], object]] = {"crc32": zlib.crc32, "sha256": hashlib.sha256}
    try:
        import xxhash
    except ImportError:
        pass
    else:
        functions["xxh3"] = xxhash.xxh3_64
    speeds = {}
    for name, function in functions.items():
        started = time.thread_time()
        function(content)
        speeds[name] = _HASHED_BYTES / (time.thread_time() - started) / 1e9
    return speeds


class _Server:
    """The part of a server that writes states."""

    def __init__(self, work: Workload) -> None:
        self._work = work
        num_blocks = -(-work.num_tokens // _BLOCK_TOKENS)
        shape = (num_blocks, _BLOCK_TOKENS, work.num_layers, work.hidden_size)
        # One prompt's states, as vLLM keeps them: [num_blocks, L, block_size, Ht].
        self.cache = torch.randn(shape, dtype=torch.bfloat16).transpose(1, 2)
        self._reader = CacheReader(self.cache, work.num_tokens, work.staging_bytes)
        self.sink = StateSink("bench", work.num_layers - 1, self._reader.staging)
        self._input_ids = torch.arange(work.num_tokens)

    def capture(self, store: Path) -> int:
        """Write the samples as the connector does; return the number of bytes on disk."""
        work, sink, reader = self._work, self.sink, self._reader
        destination = store_destination(store, work.encoding, work.shard_tokens)
        mask = torch.ones(work.num_tokens, dtype=torch.bool)
        capture = CaptureRequest.of(destination, "0", self._input_ids.tolist(), mask)
        for sample_id in range(work.num_samples):
            while (region := sink.reserve(capture, reader.bytes_of(work.num_tokens))) is None:
                time.sleep(_WAIT_SECONDS)
            copy = reader.copy(range(len(self.cache)), work.num_tokens, region)
            sink.submit(PendingWrite(replace(capture, key=str(sample_id)), self._input_ids, copy))
        sink.flush(capture.client)
        shards = FinishedShards(store)
        while True:
            assert not sink.take_news(), "the states could not be written"
            records = shards.records() if store.exists() else []
            if sum(len(record.sample_ids) for record in records) == work.num_samples:
                return sum(record.num_bytes for record in records)
            time.sleep(_WAIT_SECONDS)


def _plain_write(cache: Tensor, num_bytes: int, path: Path) -> int:
    content = cache.transpose(1, 2).reshape(-1).view(torch.uint8).numpy().data
    written = 0
    with path.open("wb") as file:
        while written < num_bytes:
            start = written % len(content)
            size = min(_WRITE_BYTES, num_bytes - written, len(content) - start)
            file.write(content[start : start + size])
            written += size
        file.flush()
        os.fsync(file.fileno())
    return written


def _timed(side: Callable[[], int]) -> Timed:
    started, cpu = time.perf_counter(), time.process_time()
    num_bytes = side()
    return Timed(num_bytes, time.perf_counter() - started, time.process_time() - cpu)


def _median(times: list[Timed]) -> dict[str, float]:
    return {
        "gb_per_second": statistics.median(one.gb_per_second for one in times),
        "cpu_seconds_per_gb": statistics.median(one.cpu_seconds / one.num_bytes * 1e9 for one in times),
        "gb": times[0].num_bytes / 1e9,
    }
