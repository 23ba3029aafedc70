"""Times training steps from a store and from a spool in turns, with random states."""

import statistics
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import deepspeed
import torch
from datasets import Dataset
from torch import nn

from data.batches.device_rows import DeviceRows
from data.batches.loader import RowLoader
from data.capture.online import OnlineStates
from data.capture.processes import ProcessProducer
from data.samples import CapturedSample, HiddenStateSource, StateShape
from data.store import HiddenStateStore
from data.store.codec import Encoding
from data.store.index import write_manifest
from data.store.writer import StoreWriter
from data.transport.spool import file_bytes, open_spool
from eagle31.model.config import DrafterConfig
from eagle31.model.drafter import Drafter
from eagle31.model.frozen import FrozenParts
from train.distributed import World
from train.trainer.loop import optimizer_step
from train.trainer.model_engine import (
    TrainedModule,
    deepspeed_config,
    ensure_process_group,
    initialize_model_engine,
)
from train.trainer.window import WindowSums

SHAPE = StateShape(num_aux_layers=3, hidden_size=128, dtype=torch.float32)
CONFIG = DrafterConfig(
    hidden_size=128,
    intermediate_size=320,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=64,
    vocab_size=4096,
    draft_vocab_size=2048,
    target_hidden_size=128,
    aux_layer_ids=(2, 4, 5),
)
ROW_TOKENS, ROWS_PER_STEP, TTT_STEPS, STEP_DECAY, LOG_EVERY = 1024, 2, 4, 0.8, 5
MIN_TOKENS, MAX_TOKENS = 64, 512
WORLD = World(rank=0, local_rank=0, size=1)


@dataclass(frozen=True)
class Round:
    """One side's steps of one round, without the first, for which nothing was read ahead."""

    steps_per_second: float
    cpu_seconds_per_step: float  # of the training process
    data_wait_fraction: float
    starved_seconds: float


def random_dataset(num_samples: int) -> Dataset:
    """Return random samples; the first third of each is the prompt and the rest the completion."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(MIN_TOKENS, MAX_TOKENS + 1, (num_samples,), generator=generator).tolist()
    ids = [torch.randint(CONFIG.vocab_size, (length,), generator=generator).tolist() for length in lengths]
    masks = [[index >= length // 3 for index in range(length)] for length in lengths]
    return Dataset.from_dict({"input_ids": ids, "loss_mask": masks})


def write_store(directory: Path, dataset: Dataset, encoding: Encoding) -> HiddenStateStore:
    """Write a store of random states for the dataset."""
    generator = torch.Generator().manual_seed(1)
    with StoreWriter(directory, "random", encoding, shard_tokens=65536) as writer:
        for index, row in enumerate(dataset.with_format("torch")):
            states = torch.randn(len(row["input_ids"]), 4, SHAPE.hidden_size, generator=generator)
            aux, final = states[:, :3].contiguous(), states[:, 3].contiguous()
            writer.append(index, CapturedSample(row["input_ids"], row["loss_mask"], aux, final))
    write_manifest(directory, {"encoding": encoding.to_json()})
    return HiddenStateStore(directory)


def build_model_engine() -> deepspeed.DeepSpeedEngine:
    ensure_process_group()
    torch.manual_seed(0)
    head = nn.Linear(CONFIG.target_hidden_size, CONFIG.vocab_size, bias=False).requires_grad_(False)
    frozen = FrozenParts(
        embed_tokens=torch.randn(CONFIG.vocab_size, CONFIG.hidden_size).to(WORLD.device),
        target_head=head.to(WORLD.device),
        draft_target_ids=torch.arange(0, CONFIG.vocab_size, 2, device=WORLD.device),
        lm_head=None,
    )
    config = deepspeed_config(
        zero_stage=0,
        bf16=False,
        micro_batches=ROWS_PER_STEP,
        world_size=1,
        offload_optimizer=False,
        offload_parameters=False,
    )
    module = TrainedModule(Drafter(CONFIG), frozen, TTT_STEPS, STEP_DECAY)
    return initialize_model_engine(
        module, config, lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0, max_grad_norm=0.5
    )


@contextmanager
def spooled(
    store: HiddenStateStore, dataset: Dataset, encoding: Encoding, spool_dir: Path | None, spool_gb: float
) -> Iterator[OnlineStates]:
    """Yield a source of the store's states, which a separate process puts into a spool."""

    def sample_bytes(loss_mask: torch.Tensor) -> int:
        return file_bytes(encoding, loss_mask, SHAPE.num_aux_layers, SHAPE.hidden_size, SHAPE.dtype)

    with open_spool(spool_dir, "bench", encoding, int(spool_gb * 1e9)) as spool:
        settings = {"store": str(store.directory), "batch_tokens": MAX_TOKENS, "transport": spool.to_json()}
        with closing(ProcessProducer("train.bench.delivery.replay_worker", settings, spool, 1)) as producer:
            yield OnlineStates(
                dataset,
                producer,
                spool,
                shape=SHAPE,
                sample_bytes=sample_bytes,
                spool_gb=spool_gb,
                name="bench",
            )


def train_round(
    model_engine: deepspeed.DeepSpeedEngine, source: HiddenStateSource, num_steps: int, seed: int
) -> Round:
    """Run `num_steps` steps with the metrics that the training loop logs."""
    loader = RowLoader(
        source,
        row_tokens=ROW_TOKENS,
        rows_per_step=ROWS_PER_STEP,
        seed=seed,
        pin_memory=WORLD.device.type == "cuda",
    )
    rows = DeviceRows(
        loader,
        num_steps=TTT_STEPS,
        device=WORLD.device,
        dtype=torch.float32,
        stop_step=num_steps + 1,
    )
    window = WindowSums(TTT_STEPS, WORLD.device)
    with closing(rows), closing(loader):
        optimizer_step(model_engine, rows.of_step(0), 1e-3, window, WORLD, with_metrics=True)
        loader.collect_stats()
        started, cpu_started, waited_before = time.perf_counter(), time.process_time(), rows.waited_seconds
        for step in range(1, num_steps + 1):
            logs = step % LOG_EVERY == 0
            optimizer_step(model_engine, rows.of_step(step), 1e-3, window, WORLD, with_metrics=logs)
            if logs:
                window.metrics(WORLD)
                window = WindowSums(TTT_STEPS, WORLD.device)
        waited = rows.waited_seconds - waited_before
        seconds, cpu = time.perf_counter() - started, time.process_time() - cpu_started
        stats = loader.collect_stats()
    return Round(
        num_steps / seconds,
        cpu / num_steps,
        waited / seconds,
        stats.starved_seconds if stats is not None else 0.0,
    )


def compare(
    directory: Path,
    *,
    rounds: int,
    num_steps: int,
    encoding: Encoding,
    spool_dir: Path | None,
    spool_gb: float,
) -> dict[str, Any]:
    """Return both sides' medians and their rounds; the store is written to `directory`."""
    rows = (rounds * 2 + 2) * ROWS_PER_STEP  # a few epochs for any number of steps
    dataset = random_dataset(max(64, rows * ROW_TOKENS * 2 // (MIN_TOKENS + MAX_TOKENS)))
    store = write_store(directory / "store", dataset, encoding)
    model_engine = build_model_engine()
    train_round(model_engine, store, LOG_EVERY, seed=0)
    sides: dict[str, list[Round]] = {"offline": [], "online": []}
    for number in range(rounds):
        for side in list(sides) if number % 2 else list(sides)[::-1]:
            if side == "offline":
                sides[side].append(train_round(model_engine, store, num_steps, seed=number))
            else:
                with spooled(store, dataset, encoding, spool_dir, spool_gb) as source:
                    sides[side].append(train_round(model_engine, source, num_steps, seed=number))
    result: dict[str, Any] = {side: summary(of_side) for side, of_side in sides.items()}
    offline, online = (result[side]["steps_per_second"] for side in ("offline", "online"))
    return result | {"online_of_offline": online / offline, "num_steps": num_steps}


def summary(rounds: list[Round]) -> dict[str, Any]:
    """Return the medians by name, and all rounds."""
    medians = {name: statistics.median(getattr(one, name) for one in rounds) for name in vars(rounds[0])}
    return medians | {"rounds": [vars(one) for one in rounds]}
