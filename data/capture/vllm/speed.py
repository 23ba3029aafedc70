"""How fast vLLM captures, against plain prefill of the same tokens by the same engine."""

import asyncio
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from data.capture.vllm.arguments import CaptureEngine
from data.capture.vllm.engine import OwnEngine
from data.capture.vllm.order import StateOrder, store_destination
from data.capture.vllm.sink import IDLE_SECONDS
from data.store.codec import Encoding
from data.store.shards import FinishedShards, ShardRecord

_POLL_SECONDS = 0.05


@dataclass(frozen=True)
class Measured:
    """One side's pass over all samples."""

    side: str  # "plain" or "capture"
    seconds: float  # until the last state is on disk
    cpu_seconds: float  # of the engine's process
    num_tokens: int


def measure_vllm(
    engine: CaptureEngine,
    samples: Sequence[tuple[Tensor, Tensor]],
    directory: Path,
    *,
    encoding: Encoding,
    shard_tokens: int,
    rounds: int,
) -> list[Measured]:
    """Two engines, of which the idle one sleeps, take turns; a round without measurement goes before.

    Args:
        engine: `roots` holds `directory`; without prefix caching, as every round has the same prompts.
        samples: input_ids int64 [T] and loss_mask bool [T] each.
    """
    return asyncio.run(_measure(engine, samples, directory, encoding, shard_tokens, rounds))


async def _measure(
    engine: CaptureEngine,
    samples: Sequence[tuple[Tensor, Tensor]],
    directory: Path,
    encoding: Encoding,
    shard_tokens: int,
    rounds: int,
) -> list[Measured]:
    engines = {
        "plain": OwnEngine(engine.plain_arguments(), directory / "plain.log"),
        "capture": OwnEngine(engine.arguments(), directory / "capture.log"),
    }
    measured = []
    try:
        for number in range(rounds + 1):
            # Every other round begins with the other side, so that neither always runs first.
            for side in ("plain", "capture") if number % 2 else ("capture", "plain"):
                store = directory / f"{side}-{number}"
                one = await _pass(engines[side], side, samples, store, encoding, shard_tokens)
                if number > 0:
                    measured.append(one)
    finally:
        for own in engines.values():
            await own.close()
    return measured


async def _pass(
    engine: OwnEngine,
    side: str,
    samples: Sequence[tuple[Tensor, Tensor]],
    store: Path,
    encoding: Encoding,
    shard_tokens: int,
) -> Measured:
    destination = store_destination(store, encoding, shard_tokens)
    prompts = [(input_ids.tolist(), loss_mask) for input_ids, loss_mask in samples]
    orders = [
        StateOrder.of(destination, str(i), input_ids, mask).to_params() if side == "capture" else {}
        for i, (input_ids, mask) in enumerate(prompts)
    ]
    if engine.process_id is None:
        await engine.send(prompts[0][0], {})
    cpu_before, started, begun = _cpu_seconds(engine), time.perf_counter(), time.time()
    await asyncio.gather(
        *(engine.send(input_ids, order) for (input_ids, _), order in zip(prompts, orders, strict=True))
    )
    seconds = time.perf_counter() - started
    if side == "capture":
        seconds = max(seconds, await _written(store, len(samples)) - begun)
    num_tokens = sum(len(input_ids) for input_ids, _ in prompts)
    return Measured(side, seconds, _cpu_seconds(engine) - cpu_before, num_tokens)


async def _written(store: Path, num_samples: int) -> float:
    """When the last sample was on disk, but for the pause after which an open shard is ended."""
    shards = FinishedShards(store)
    records: list[ShardRecord] = []
    while sum(len(record.sample_ids) for record in records) < num_samples:
        await asyncio.sleep(_POLL_SECONDS)
        records = shards.records() if store.exists() else []
    times = [(store / record.file).stat().st_mtime for record in records]
    return max(times) - IDLE_SECONDS


def _cpu_seconds(engine: OwnEngine) -> float:
    fields = Path(f"/proc/{engine.process_id}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
