"""The sides of scripts/bench/capture: plain prefill, and capture with each codec; in transformers or vLLM."""

import asyncio
import os
import secrets
import shutil
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, redirect_stderr
from dataclasses import dataclass
from functools import partial
from io import StringIO
from pathlib import Path

import psutil
import torch
from datasets import Dataset
from torch import nn

from data.capture.arriving import ArrivingStates
from data.capture.filling import StoreSpec, fill_store
from data.capture.hf import HiddenStateCapture
from data.capture.hf_source import batches_by_length, capture_samples
from data.capture.producer import EngineProducer
from data.capture.tokens import TokenRows, dataset_lengths
from data.capture.transport.spool import MEMORY, file_bytes, open_spool
from data.capture.vllm.arguments import CaptureEngine
from data.capture.vllm.capture_request import capture_tasks
from data.capture.vllm.client import ExpectedStates, VllmClient
from data.capture.vllm.server_process import ServerProcess
from data.samples import CapturedSample, StateShape
from data.target.architecture import has_latent_attention
from data.target.loading import load_target
from data.target.modules import locate
from data.target.parts import TargetParts, load_target_parts
from data.target.spec import TargetSpec

PREFILL = "prefill"
_START_SECONDS = 1800.0  # time to load a target
_PATIENCE_SECONDS = 60.0
_CONCURRENCY = 256  # vLLM's scheduler chooses among so many prompts
_SPOOL_BYTES = 2 * 10**9


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
    codecs: tuple[str, ...]
    batch_tokens: int
    shard_tokens: int
    scratch: Path  # an empty directory for stores


RunSide = Callable[[], Timing]  # runs over all samples once


@contextmanager
def open_hf(task: Task) -> Iterator[Mapping[str, RunSide]]:
    """Yield the sides; plain prefill runs the decoder on capture's batches, and no side runs the lm_head."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = load_target(task.spec, device)
    capture = HiddenStateCapture(model, locate(model), task.aux_layer_ids)
    sides = {one: partial(_capture, task, capture, one) for one in task.codecs}
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


def _capture(task: Task, capture: HiddenStateCapture, codec: str) -> Timing:
    """Time a capture from an empty directory to a finished store."""
    directory = task.scratch / "store"
    started, cpu = time.perf_counter(), time.process_time()
    with redirect_stderr(StringIO()):
        fill_store(
            StoreSpec(directory, task.dataset, codec),
            partial(capture_samples, task.dataset, capture, task.batch_tokens),
            capture,
            shard_tokens=task.shard_tokens,
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
        roots=[str(MEMORY)],
        dtype=str(parts.embed_tokens.dtype).removeprefix("torch."),
        trust_remote_code=task.spec.trust_remote_code,
        mla=has_latent_attention(parts.config),
        extra={"enable_prefix_caching": False},  # because every round has the same prompts
    )
    plain = _Server(engine.plain_command_line(), scratch / "plain.log")
    capturing = _Server(engine.command_line(), scratch / "capture.log")
    sides = {codec: partial(_capture_in_vllm, capturing, task, parts, codec) for codec in task.codecs}
    try:
        yield {PREFILL: partial(_prefill_in_vllm, plain, task), **sides}
    finally:
        for one in (plain, capturing):
            one.close()


class _Server:
    """A server that starts with its first pass."""

    def __init__(self, arguments: list[str], log: Path) -> None:
        self._arguments, self._log = arguments, log
        self._process: ServerProcess | None = None
        self._key = secrets.token_urlsafe(32)

    def client(self) -> VllmClient:
        """Return a client of the server, which is ready."""
        if self._process is None:
            self._process = ServerProcess(
                self._arguments,
                host="127.0.0.1",
                port=None,
                key=self._key,
                devices=None,
                log=self._log,
                limit_seconds=_START_SECONDS,
            )
            self._process.wait_until_ready(progress=True)
        return VllmClient(self._process.url, _CONCURRENCY, self._key, self._process.check)

    def cpu_seconds(self) -> float:
        """Return the CPU time of all processes of the server."""
        assert self._process is not None
        times = [one.cpu_times() for one in psutil.Process(self._process.process_id).children(recursive=True)]
        return sum(one.user + one.system for one in times)

    def close(self) -> None:
        if self._process is not None:
            self._process.close()


def _prefill_in_vllm(server: _Server, task: Task) -> Timing:
    """Send all samples once."""
    rows = [ids.tolist() for ids, _ in TokenRows(task.dataset).read(range(len(task.dataset)))]

    async def send_all(client: VllmClient) -> None:
        await asyncio.gather(*(client.capture(ids, {}) for ids in rows))
        await client.close()

    client = server.client()
    return _timed(server, lambda: asyncio.run(send_all(client)))


def _capture_in_vllm(server: _Server, task: Task, parts: TargetParts, codec: str) -> Timing:
    """Capture all samples from an empty directory to a finished store."""
    expected = ExpectedStates(
        target=task.spec.checkpoint.path,
        target_fingerprint=parts.fingerprint,
        aux_layer_ids=task.aux_layer_ids,
        hidden_size=parts.hidden_size,
        num_layers=parts.num_layers,
        dtype=parts.embed_tokens.dtype,
    )
    shape = StateShape(len(task.aux_layer_ids), parts.hidden_size, expected.dtype)

    def captured(
        _: Sequence[int], missing: Sequence[int]
    ) -> Generator[tuple[int, CapturedSample | str], None, None]:
        with open_spool(None, f"bench-{os.getpid()}", "exact", _SPOOL_BYTES) as spool:
            producer = EngineProducer([client], capture_tasks(spool), lambda *_: None, _PATIENCE_SECONDS)
            with closing(producer):
                source = ArrivingStates(
                    task.dataset,
                    producer,
                    spool,
                    shape=shape,
                    sample_bytes=lambda mask: file_bytes("exact", mask, *vars(shape).values()),
                    spool_gb=_SPOOL_BYTES / 1e9,
                    name="bench",
                )
                yield from source.captured(missing)

    def fill() -> None:
        with redirect_stderr(StringIO()):
            fill_store(
                StoreSpec(task.scratch / "store", task.dataset, codec),
                captured,
                expected,
                shard_tokens=task.shard_tokens,
                manifest_fields={},
            )

    client = server.client()
    timing = _timed(server, fill)
    shutil.rmtree(task.scratch / "store")
    return timing


def _timed(server: _Server, work: Callable[[], None]) -> Timing:
    """Time a pass of this process and the server."""
    before, cpu, started = server.cpu_seconds(), time.process_time(), time.perf_counter()
    work()
    seconds = time.perf_counter() - started
    return Timing(seconds, server.cpu_seconds() - before + time.process_time() - cpu)
