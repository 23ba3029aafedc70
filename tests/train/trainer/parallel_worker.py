"""Runs under torchrun: a few steps at every ZeRO stage on different rows; rank 0 writes the losses."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from data.batches.loader import RowLoader
from data.samples import CapturedSample
from tests.eagle31.tiny import random_batch, tiny_config, tiny_drafter
from train.distributed import World, leave_process_group
from train.trainer.loop import WindowSums, optimizer_step
from train.trainer.model_engine import (
    TrainedModule,
    deepspeed_config,
    ensure_process_group,
    full_state,
    initialize_model_engine,
)

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


def losses_at(zero_stage: int, bf16: bool, world: World) -> dict:
    drafter, frozen = tiny_drafter(tiny_config(), torch.bfloat16 if bf16 else torch.float32)
    drafter = drafter.float()
    module = TrainedModule(drafter, frozen, num_steps=3, step_decay=0.8)
    loader = RowLoader(
        MemorySource(),
        row_tokens=ROW_TOKENS,
        rows_per_step=ROWS_PER_STEP,
        rank=world.rank,
        world_size=world.size,
        seed=0,
    )
    model_engine = initialize_model_engine(
        module,
        deepspeed_config(
            zero_stage=zero_stage,
            bf16=bf16,
            micro_batches=ROWS_PER_STEP // world.size,
            world_size=world.size,
            max_grad_norm=0.5,
            offload_optimizer=False,
            offload_parameters=False,
        ),
        lr=1e-2,
        betas=(0.9, 0.95),
        eps=1e-8,
        weight_decay=0.0,
    )
    dtype = torch.bfloat16 if bf16 else torch.float32
    losses, norms = [], []
    for step in range(NUM_STEPS):
        window = WindowSums(3, world.device)
        _, norm = optimizer_step(
            model_engine, loader.batches(step), 1e-2, window, world, dtype, with_metrics=step % 2 == 0
        )
        losses.append(window.metrics(world, 0.8)["loss"])
        norms.append(float(norm))
    loader.close()
    weights = full_state(model_engine)
    return {
        "losses": losses,
        "grad_norms": norms,
        "weights": {name: value.double().sum().item() for name, value in weights.items()},
    }


def main() -> None:
    world = World.from_environment()
    ensure_process_group()
    results = {f"zero{stage}": losses_at(stage, False, world) for stage in range(4)}
    results |= {f"bf16-zero{stage}": losses_at(stage, True, world) for stage in (0, 2)}
    if world.is_main:
        Path(sys.argv[1]).write_text(json.dumps(results))
    leave_process_group()


if __name__ == "__main__":
    main()
