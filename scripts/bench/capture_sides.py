"""The sides of scripts/bench/capture: plain prefill, and capture with each codec; in transformers or vLLM."""

import asyncio
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from functools import partial
from io import StringIO
from itertools import count
from pathlib import Path

import torch
from datasets import Dataset
from torch import nn

from data.capture.hf import HiddenStateCapture
from data.capture.offline import batches_by_length, capture_to_store
from data.capture.opening import StoreSpec
from data.capture.tokens import TokenRows, dataset_lengths
from data.processes.supervisor import descendants
from data.store.codec import Encoding
from data.store.shards import FinishedShards, ShardRecord
from data.target.loading import load_target
from data.target.modules import locate
from data.target.parts import load_target_parts
from data.target.spec import TargetSpec
from data.vllm.arguments import CaptureEngine
from data.vllm.capture_request import CaptureRequest, with_client
from data.vllm.destinations import store_destination
from data.vllm.endpoint import describe
from data.vllm.server import VllmServer
from data.vllm.server_process import ServerProcess

PREFILL = "prefill"
_POLL_SECONDS = 0.05
_START_SECONDS = 1800.0  # time to load a target
_CLIENT = "bench"
_CONCURRENCY = 256  # vLLM's scheduler chooses among so many prompts


@dataclass(frozen=True)
class Timing:
    """Time of one pass over all samples."""

    wall_seconds: float
    cpu_seconds: float  # of all processes of the side


@dataclass(frozen=True)
class Task:
    """The input of every side: the samples and how to capture them."""

    spec: TargetSpec
    aux_layer_ids: tuple[int, ...]
    dataset: Dataset  # columns input_ids and loss_mask
    encodings: tuple[Encoding, ...]
    batch_tokens: int
    shard_tokens: int
    scratch: Path  # an empty directory for stores


RunSide = Callable[[], Timing]  # runs over all samples once


@contextmanager
def open_hf(task: Task) -> Iterator[Mapping[str, RunSide]]:
    """Yield the sides; plain prefill runs the decoder on capture's batches, and no side runs the lm_head."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = load_target(task.spec, device)
    capture = HiddenStateCapture(model, locate(model, task.spec), task.aux_layer_ids)
    sides = {one.codec: partial(_capture, task, capture, one) for one in task.encodings}
    yield {PREFILL: partial(_prefill, task, capture), **sides}


@torch.inference_mode()
def _prefill(task: Task, capture: HiddenStateCapture) -> Timing:
    started, cpu = time.perf_counter(), time.process_time()
    tokens = TokenRows(task.dataset)
    for indices in batches_by_length(dataset_lengths(task.dataset), task.batch_tokens):
        ids = [input_ids for input_ids, _ in tokens.read(indices)]
        padded = nn.utils.rnn.pad_sequence(ids, batch_first=True).to(capture.device)
        capture.modules.decoder(input_ids=padded, use_cache=False)
    if capture.device.type == "cuda":
        torch.cuda.synchronize(capture.device)
    return Timing(time.perf_counter() - started, time.process_time() - cpu)


def _capture(task: Task, capture: HiddenStateCapture, encoding: Encoding) -> Timing:
    """Time a capture from an empty directory to a finished store."""
    directory = task.scratch / "store"
    started, cpu = time.perf_counter(), time.process_time()
    with redirect_stderr(StringIO()):
        capture_to_store(
            StoreSpec(directory, task.dataset, encoding),
            capture,
            shard_tokens=task.shard_tokens,
            batch_tokens=task.batch_tokens,
            manifest_fields={},
        )
    timing = Timing(time.perf_counter() - started, time.process_time() - cpu)
    shutil.rmtree(directory)
    return timing


@contextmanager
def open_vllm(task: Task) -> Iterator[Mapping[str, RunSide]]:
    """Yield the sides; prefill uses a server without hidden states, and no server caches prefixes."""
    parts, scratch = load_target_parts(task.spec), task.scratch
    engine = CaptureEngine(
        target=task.spec.checkpoint.path,
        aux_layer_ids=task.aux_layer_ids,
        num_layers=parts.num_layers,
        max_tokens=max(dataset_lengths(task.dataset)),
        roots=[str(scratch.resolve())],
        dtype=str(parts.embed_tokens.dtype).removeprefix("torch."),
        trust_remote_code=task.spec.trust_remote_code,
        mla=getattr(parts.config.get_text_config(), "kv_lora_rank", None) is not None,
        extra={"enable_prefix_caching": False},  # because every round has the same prompts
    )
    plain = _Server(engine.plain_command_line(), scratch / "plain.log")
    capturing = _Server(engine.command_line(), scratch / "capture.log")
    loop, numbers = asyncio.new_event_loop(), count()

    def prefill() -> Timing:
        return loop.run_until_complete(_pass(plain, task))

    def capture(encoding: Encoding) -> Timing:
        store = scratch / f"store-{next(numbers)}"
        timing = loop.run_until_complete(_pass(capturing, task, store, encoding))
        shutil.rmtree(store)
        return timing

    try:
        yield {PREFILL: prefill, **{one.codec: partial(capture, one) for one in task.encodings}}
    finally:
        for one in (plain, capturing):
            loop.run_until_complete(one.close())
        loop.close()


class _Server:
    """A server that starts with its first pass."""

    def __init__(self, arguments: list[str], log: Path) -> None:
        self._arguments, self._log = arguments, log
        self._process: ServerProcess | None = None
        self._endpoint: VllmServer | None = None

    async def started(self, input_ids: list[int]) -> VllmServer:
        """Return the server, which has computed a prompt."""
        if self._endpoint is None:
            key = secrets.token_urlsafe(32)
            self._process = ServerProcess(
                self._arguments,
                host="127.0.0.1",
                port=None,
                key=key,
                devices=None,
                log=self._log,
                limit_seconds=_START_SECONDS,
            )
            self._process.wait_until_ready(progress=True)
            self._endpoint = VllmServer(self._process.url, _CONCURRENCY, key, self._process.check)
            await self._endpoint.send(input_ids, {})
        return self._endpoint

    def cpu_seconds(self) -> float:
        """Return the CPU time of all processes of the server."""
        assert self._process is not None
        assert self._process.process_id is not None
        server = self._process.process_id
        return sum(_cpu_seconds(process) for process in (server, *descendants(server)))

    async def close(self) -> None:
        if self._endpoint is not None:
            await self._endpoint.close()
        if self._process is not None:
            self._process.close()


async def _pass(
    server: _Server, task: Task, store: Path | None = None, encoding: Encoding | None = None
) -> Timing:
    """Send all samples once; with a store, until the last state is on disk."""
    samples = [(ids.tolist(), mask) for ids, mask in TokenRows(task.dataset).read(range(len(task.dataset)))]
    requests: list[dict] = [{} for _ in samples]
    if store is not None and encoding is not None:
        destination = store_destination(store, encoding, task.shard_tokens)
        requests = [
            with_client(CaptureRequest.of(destination, str(i), ids, mask).to_params(), _CLIENT)
            for i, (ids, mask) in enumerate(samples)
        ]
    endpoint = await server.started(samples[0][0])
    cpu_before, started, begun = server.cpu_seconds(), time.perf_counter(), time.time()
    await asyncio.gather(
        *(endpoint.send(ids, request) for (ids, _), request in zip(samples, requests, strict=True))
    )
    seconds = time.perf_counter() - started
    if store is not None:
        await describe(endpoint, _CLIENT, flush=True)
        seconds = max(seconds, await _written(store, len(samples)) - begun)
    return Timing(seconds, server.cpu_seconds() - cpu_before)


async def _written(store: Path, num_samples: int) -> float:
    """Return when the last sample was on disk, by the file system's clock."""
    shards = FinishedShards(store)
    shard_records: list[ShardRecord] = []
    while sum(len(record.sample_ids) for record in shard_records) < num_samples:
        await asyncio.sleep(_POLL_SECONDS)
        shard_records = shards.records() if store.exists() else []
    times = [(store / record.file).stat().st_mtime for record in shard_records]
    return max(times)


def _cpu_seconds(process: int) -> float:
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
