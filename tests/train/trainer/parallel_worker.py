"""Runs under torchrun: a few steps at every ZeRO stage on different rows; rank 0 writes the losses."""

import json
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from data.batches.device_rows import DeviceRows, StepRows
from data.batches.loader import RowLoader
from data.batches.shared_rows import SharedRows
from data.samples import CapturedSample, StateShape
from eagle31.training.schedule import DraftCosts
from tests.data.batches.memory_source import MemorySource
from tests.eagle31.tiny import DSPARK, random_batch, tiny_config
from tests.eagle31.training.shared_worker import shared_gradients
from tests.train.trainer.tiny_engines import (
    LR,
    MATRIX_LR,
    MAX_NORM,
    ROW_TOKENS,
    ROWS_PER_STEP,
    new_engine,
    random_source,
)
from train.distributed import World, leave_ranks, wait_for_ranks
from train.tracking import flatten_metrics
from train.trainer import process_groups
from train.trainer.engine import full_state
from train.trainer.engine_state import master_weights
from train.trainer.matrices import is_matrix
from train.trainer.metrics import WindowSums
from train.trainer.process_groups import RowGroups, ensure_process_group, row_groups
from train.trainer.train import optimizer_step
from train.trainer.validation import DriftDiagnosis, ReplayValidation

NUM_STEPS = 3


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


def snapshot(model_engine: Any) -> list[Tensor]:
    """Copies of the float32 weights and of this rank's optimizer states."""
    states = map(model_engine.basic_optimizer.state.__getitem__, master_weights(model_engine))
    copies = [state[name].clone() for state in states for name in sorted(state)]
    return [*full_state(model_engine, keep=True).values(), *copies]


def refused_steps(model_engine: Any, step: StepRows, world: World) -> dict:
    """A step with NaN on the last rank, which must change nothing, and one that is taken."""
    rows = list(step.rows)
    damaged = list(rows)
    if world.rank == world.size - 1:
        batch = rows[0].batch
        damaged[0] = replace(
            rows[0], batch=replace(batch, final_hidden_states=batch.final_hidden_states * torch.nan)
        )
    found: dict[str, Any] = {}
    before = snapshot(model_engine)
    for name, some in {"damaged": damaged, "sound": rows}.items():
        weights = full_state(model_engine, keep=True)
        window, one = WindowSums(3, world.device), replace(step, rows=iter(some))
        _, norm = optimizer_step(model_engine, one, LR, MAX_NORM, window, world, with_metrics=False)
        unchanged = all(map(torch.equal, before, snapshot(model_engine)))
        found[name] = {"refused": not norm.isfinite(), "unchanged": unchanged}
        found["singular values"] = singular_values(weights, full_state(model_engine, keep=True))
    return found


def singular_values(before: dict[str, Tensor], after: dict[str, Tensor]) -> dict[str, list[float]]:
    """Smallest and largest singular value of each matrix's update, by its rate and scale, by name."""
    found = {}
    for name, old in before.items():
        if is_matrix(name, old.shape):
            scale = MATRIX_LR * max(1, old.shape[0] / old.shape[1]) ** 0.5
            values = torch.linalg.svdvals((old - after[name]) / scale)
            found[name] = [float(values.min()), float(values.max())]
    return found


def losses_at(
    zero_stage: int,
    bf16: bool,
    world: World,
    matrix_lr: float | None = None,
    *,
    offload: bool = False,
    groups: RowGroups | None = None,
    changes: Mapping[str, Any] = {},
) -> dict:
    source = random_source()
    loader = RowLoader(
        source,
        costs=[float(sample.loss_mask.sum()) for sample in source.samples],
        row_tokens=ROW_TOKENS,
        rows_per_step=ROWS_PER_STEP,
        rank=0 if groups else world.rank,
        world_size=1 if groups else world.size,
        seed=0,
        reader=world.rank if groups else 0,
        num_readers=world.size if groups else 1,
    )
    model_engine = new_engine(
        zero_stage, bf16, world, matrix_lr, offload=offload, groups=groups, changes=changes
    )
    dtype = torch.bfloat16 if bf16 else torch.float32
    shape = StateShape.of(source.samples[0].aux_hidden_states)
    in_chunks = world.size > 1 and matrix_lr is None and not bf16
    rows = DeviceRows(
        loader,
        num_steps=3,
        device=world.device,
        dtype=dtype,
        stop_step=NUM_STEPS + 1,
        # What they are compared with, one process, rolls out whole rows.
        chunk_rows=7 if in_chunks else None,
        shared=groups and SharedRows(groups.on_host, shape, None, DraftCosts(1.0, 0.01, None)),
    )
    losses, norms, stops = [], [], []
    for step in range(NUM_STEPS):
        window = WindowSums(3, world.device)
        # The last rank is told to stop at step 2.
        counts, norm = optimizer_step(
            model_engine,
            rows.of_step(step),
            LR,
            MAX_NORM,
            window,
            world,
            with_metrics=step % 2 == 0,
            stop=step == 2 and world.rank == world.size - 1,
        )
        num_supervised, num_stopping, _ = counts.read()
        stops.append(num_stopping)
        metrics = window.metrics(world)
        assert num_supervised == metrics["supervised_positions"]
        assert all(0 <= depth["agreement"] <= 1 for depth in metrics["depth"])
        losses.append(metrics["loss"])
        norms.append(float(norm))
    further = rows.of_step(NUM_STEPS)
    assert stops == [0, 0, 1]
    weights = full_state(model_engine, keep=world.is_main)
    assert bool(weights) == world.is_main
    held_out = MemorySource(validation_samples())
    validation = ReplayValidation(held_out, ROW_TOKENS, 3, 3, world)  # the rows have 1 and 12 chunks
    stats = validation.run(model_engine.module)
    diagnosis = DriftDiagnosis(held_out, 99, 8, world)
    drift = diagnosis.run(model_engine.module)
    assert (drift is not None) == (world.is_main and not changes)
    refused = refused_steps(model_engine, further, world)
    loader.close()
    return {
        "replay": {str(k): [one.num_drafts, *one.accepted_per_position] for k, one in stats.items()},
        "drift": drift and flatten_metrics({"kind": "drift", "step": NUM_STEPS} | drift),
        "losses": losses,
        "grad_norms": norms,
        "weights": {name: value.double().sum().item() for name, value in weights.items()},
        "rounded": all(torch.equal(value, value.bfloat16().float()) for value in weights.values()),
        "refused": refused,
    }


def main() -> None:
    world = World.from_environment()
    time.sleep(0.2 * world.rank)
    Path(f"{sys.argv[1]}.{world.rank}").touch()
    wait_for_ranks(world)
    assert all(Path(f"{sys.argv[1]}.{rank}").exists() for rank in range(world.size))
    ensure_process_group()
    group = dist.group.WORLD
    assert group is not None
    assert group._get_backend(world.device).options._timeout == timedelta(
        minutes=process_groups.TIMEOUT_MINUTES
    )
    # What two processes are compared with is of one process.
    fp32, bf16, muon = ((0, 2, 3), (1, 3), (2, 3)) if world.size > 1 else ((0,), (1,), (0,))
    results = {f"zero{stage}": losses_at(stage, False, world) for stage in fp32}
    results |= {f"bf16-zero{stage}": losses_at(stage, True, world) for stage in bf16}
    results["dspark"] = losses_at(fp32[-1], False, world, changes=DSPARK)
    results |= {f"muon-zero{stage}": losses_at(stage, False, world, matrix_lr=MATRIX_LR) for stage in muon}
    if world.size > 1:
        groups = row_groups(world.size)
        assert groups is not None
        results["shared gradients"] = shared_gradients(groups.on_device)
        results |= {f"shared-zero{stage}": losses_at(stage, False, world, groups=groups) for stage in (1, 3)}
        results["muon-bf16-offload-zero3"] = losses_at(3, True, world, matrix_lr=MATRIX_LR, offload=True)
    if world.is_main:
        Path(sys.argv[1]).write_text(json.dumps(results))
    leave_ranks(world)


if __name__ == "__main__":
    main()
