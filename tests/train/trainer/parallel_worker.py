"""Runs under torchrun: a few steps at every ZeRO stage on different rows; rank 0 writes the losses."""

import json
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from data.batches.device_rows import DeviceRows
from data.batches.loader import RowLoader
from data.samples import CapturedSample
from eagle31.training.step import greedy_hits
from tests.eagle31.tiny import random_batch, tiny_config, tiny_drafter
from train.distributed import World, leave_process_group, wait_for_ranks
from train.trainer import model_engine as engine_module
from train.trainer.loop import optimizer_step
from train.trainer.model_engine import (
    TrainedModule,
    deepspeed_config,
    ensure_process_group,
    full_state,
    initialize_model_engine,
)
from train.trainer.validation import ReplayValidation
from train.trainer.window import WindowSums

ROWS_PER_STEP, NUM_STEPS, ROW_TOKENS = 4, 4, 48


class MemorySource:
    """Random samples of different lengths and different numbers of supervised positions."""

    def __init__(self) -> None:
        config = tiny_config()
        self.samples = []
        for seed in range(40):
            batch = random_batch((16 + seed % 31,), config, seed=seed, dtype=torch.float32)
            batch.loss_mask[5 : 8 + seed % 7] = True
            self.samples.append(
                CapturedSample(
                    batch.input_ids, batch.loss_mask, batch.aux_hidden_states, batch.final_hidden_states
                )
            )
        self.lengths = [len(sample.input_ids) for sample in self.samples]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> CapturedSample:
        return self.samples[index]

    def get_many(self, indices: Sequence[int]) -> list[CapturedSample]:
        return [self.samples[i] for i in indices]


def validation_samples() -> list[CapturedSample]:
    """Two samples that fill a row each, with three and with 36 supervised positions."""
    found = []
    for seed, stop in enumerate((12, 45)):
        batch = random_batch((ROW_TOKENS,), tiny_config(), seed=seed, dtype=torch.float32)
        mask = torch.zeros(ROW_TOKENS, dtype=torch.bool)
        mask[8:stop] = True
        states = batch.aux_hidden_states, batch.final_hidden_states
        found.append(CapturedSample(batch.input_ids % 5, mask, *states))
    return found


def losses_at(zero_stage: int, bf16: bool, world: World) -> dict:
    drafter, frozen = tiny_drafter(tiny_config(), torch.bfloat16 if bf16 else torch.float32)
    drafter = drafter.float()
    module = TrainedModule(drafter, frozen, num_steps=3, step_decay=0.8)
    source = MemorySource()
    loader = RowLoader(
        source,
        costs=[float(sample.loss_mask.sum()) for sample in source.samples],
        row_tokens=ROW_TOKENS,
        rows_per_step=ROWS_PER_STEP,
        rank=world.rank,
        world_size=world.size,
        seed=0,
    )
    config = deepspeed_config(
        zero_stage=zero_stage,
        bf16=bf16,
        micro_batches=ROWS_PER_STEP // world.size,
        world_size=world.size,
        max_grad_norm=0.5,
        offload_optimizer=False,
        offload_parameters=False,
    )
    # By default DeepSpeed partitions no parameter that is as small as those here.
    config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    model_engine = initialize_model_engine(
        module,
        config,
        lr=1e-2,
        betas=(0.9, 0.95),
        eps=1e-8,
        weight_decay=0.0,
    )
    dtype = torch.bfloat16 if bf16 else torch.float32
    rows = DeviceRows(
        loader,
        num_rows=ROWS_PER_STEP // world.size,
        num_steps=3,
        device=world.device,
        dtype=dtype,
        stop_step=NUM_STEPS,
    )
    losses, norms, stops = [], [], []
    for step in range(NUM_STEPS):
        window = WindowSums(3, world.device)
        # The last rank is told to stop at step 2.
        counts, norm = optimizer_step(
            model_engine,
            rows.of_step(step),
            1e-2,
            window,
            world,
            with_metrics=step % 2 == 0,
            stop=step == 2 and world.rank == world.size - 1,
        )
        num_supervised, num_stopping = counts.read()
        stops.append(num_stopping)
        metrics = window.metrics(world, 0.8)
        assert num_supervised == metrics["supervised_positions"]
        losses.append(metrics["loss"])
        norms.append(float(norm))
    loader.close()
    assert stops == [0, 0, 1, 0]
    weights = full_state(model_engine, keep=world.is_main)
    assert bool(weights) == world.is_main
    validation = ReplayValidation(validation_samples(), ROW_TOKENS, 3, world)
    stats = validation.run(model_engine.module, world.device, dtype)
    return {
        "replay": {str(k): [one.num_drafts, *one.accepted_per_position] for k, one in stats.items()},
        "losses": losses,
        "grad_norms": norms,
        "weights": {name: value.double().sum().item() for name, value in weights.items()},
    }


def main() -> None:
    world = World.from_environment()
    time.sleep(0.2 * world.rank)
    Path(f"{sys.argv[1]}.{world.rank}").touch()
    wait_for_ranks("test", world)
    assert all(Path(f"{sys.argv[1]}.{rank}").exists() for rank in range(world.size))
    ensure_process_group(timeout_minutes=2.0)
    group = dist.group.WORLD
    assert group is not None
    assert group._get_backend(world.device).options._timeout == timedelta(minutes=2.0)
    # The rows of validation have 1 and 12 chunks.
    engine_module.greedy_hits = partial(greedy_hits, chunk_rows=3)
    results = {f"zero{stage}": losses_at(stage, False, world) for stage in range(4)}
    results |= {f"bf16-zero{stage}": losses_at(stage, True, world) for stage in (0, 2)}
    if world.is_main:
        Path(sys.argv[1]).write_text(json.dumps(results))
    leave_process_group()


if __name__ == "__main__":
    main()
