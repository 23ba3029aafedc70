"""Capture through a server, as the capture stage does it."""

import itertools
import os
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path

import httpx
from datasets import Dataset

from data.capture.arriving import ArrivingStates
from data.capture.dispatch import PATIENCE_SECONDS, Dispatcher
from data.capture.filling import StoreSpec, fill_store
from data.capture.tokens import tokens_fingerprint
from data.capture.transport.protocol import OpenTransport
from data.capture.transport.spool import file_bytes, open_spool
from data.capture.vllm.capture_request import capture_params
from data.capture.vllm.client import VllmClient, check_states
from data.capture.vllm.server_process import ServerProcess
from data.generation.answers import answer_prompts
from data.generation.vllm import VllmGenerator
from data.samples import CapturedSample, StateShape
from data.sampling import Sampling
from data.store import HiddenStateStore
from data.target.parts import CapturedTarget

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
    target: CapturedTarget,
    root: Path,
    patience_seconds: float = PATIENCE_SECONDS,
    spool_gb: float = 0.01,
) -> None:
    """Fill a store through a server, as the capture stage does; the spool is in `root`."""
    shape = StateShape(target.num_aux_layers, target.parts.hidden_size, target.parts.dtype)
    check = partial(check_states, target, max(map(len, dataset["input_ids"])))

    def captured(
        _: Sequence[int], missing: Sequence[int]
    ) -> Generator[tuple[int, CapturedSample | str], None, None]:
        with (
            open_spool(root, f"test-{os.getpid()}", CODEC, int(spool_gb * 1e9)) as spool,
            closing(Dispatcher([client], check, patience_seconds)) as dispatcher,
        ):
            opened = OpenTransport(
                spool,
                shape,
                lambda mask: file_bytes(CODEC, mask, shape),
                partial(capture_params, spool),
            )
            source = ArrivingStates(
                dataset, dispatcher, opened, spool_gb=spool_gb, name="test", checks_refused=False
            )
            yield from source.captured(missing)

    store = StoreSpec(directory, dataset, CODEC, tokens_fingerprint(dataset), {"target": "tiny"})
    fill_store(store, captured, shape, shard_tokens=500)


def counter(url: str, name: str) -> float:
    """Return one of the server's metrics."""
    answer = httpx.get(f"{url}/metrics", headers={"Authorization": f"Bearer {KEY}"})
    [line] = [line for line in answer.text.splitlines() if line.startswith(f"vllm:{name}_total{{")]
    return float(line.split()[-1])


def capture_until_preempted(
    url: str,
    dataset: Dataset,
    prompts: list[list[int]],
    num_tokens: int,
    target: CapturedTarget,
    root: Path,
) -> Iterator[tuple[HiddenStateStore, list[list[int]]]]:
    """Have completions grow, next to prompts that are being captured, until vLLM preempts one.

    What was preempted is computed again. Yields the states and the completions of each attempt: now and then
    all find room, depending on when each request arrives.
    """
    num_preemptions = counter(url, "num_preemptions")
    for number in itertools.count():
        client = VllmClient(url, 8, KEY, answer_seconds=STALL_SECONDS)
        clients = [VllmClient(url, 8, KEY, answer_seconds=STALL_SECONDS)]
        writer = VllmGenerator(clients, lambda *_: None)
        sampling, output = Sampling(num_tokens, (), 0.0, seed=0), root / f"growing-{number}.jsonl"
        with ThreadPoolExecutor(1) as pool:
            growing = pool.submit(
                answer_prompts, writer, prompts, sampling, output=output, model_fingerprint="f"
            )
            capture_store(client, dataset, root / f"preempted-{number}", target, root)
            answers = growing.result()
        writer.close()
        yield HiddenStateStore(root / f"preempted-{number}"), answers
        if counter(url, "num_preemptions") > num_preemptions:
            return
