"""A draft head that is trained late, while the rows of a step grow; with DeepSpeed, and in PyTorch alone."""

import shutil
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from data.batches.device_rows import DeviceRows
from data.batches.loader import RowLoader, RowPosition
from data.batches.row_schedule import RowSchedule
from eagle31.training.step import rollout_loss
from tests.eagle31.tiny import tiny_config, tiny_drafter
from tests.train.trainer.engine_checks import snapshot
from tests.train.trainer.tiny_engines import (
    BETAS,
    LR,
    MUON,
    ROW_TOKENS,
    ROWS_PER_STEP,
    WEIGHT_DECAY,
    new_engine,
    random_source,
)
from train.distributed import World, on_main_first
from train.optim.matrices import HEAD
from train.trainer.checkpoints import CheckpointDirectory, TrainState
from train.trainer.loop import optimizer_step
from train.trainer.model_engine import full_state
from train.trainer.muon import MuonSettings
from train.trainer.window import WindowSums

HEAD_START = 2


def late_head(
    zero_stage: int,
    bf16: bool,
    world: World,
    directory: Path,
    muon: MuonSettings | None = None,
    *,
    offload: bool = False,
) -> dict[str, Any]:
    """Four steps with 2, 2, 2 and 4 rows; the last two change the draft head. They are also resumed.

    Args:
        directory: for a checkpoint.
    """
    dtype = torch.bfloat16 if bf16 else torch.float32
    model_engine = new_engine(zero_stage, bf16, world, muon=muon, offload=offload, head_apart=True)
    saved = CheckpointDirectory(directory, 1, world)
    weights, losses, norms = [full_state(model_engine, keep=True)], [], []
    found: dict[str, Any] = {"warm": True}
    with closing(growing_loader(world, RowPosition())) as loader:
        rows = DeviceRows(loader, num_steps=3, device=world.device, dtype=dtype, stop_step=4)
        for number in range(4):
            window = WindowSums(3, world.device)
            trains_head = number >= HEAD_START
            if number == HEAD_START:
                if zero_stage == 0:
                    found["warm"] = bool(head_state(model_engine)["exp_avg"].any())
                saved.save(model_engine, TrainState(2, row=loader.position(2)[1]))
            step = rows.of_step(number)
            _, norm = optimizer_step(
                model_engine, step, LR, window, world, with_metrics=False, trains_head=trains_head
            )
            weights.append(full_state(model_engine, keep=True))
            losses.append(window.metrics(world)["loss"])
            norms.append(float(norm))
    resumed = new_engine(zero_stage, bf16, world, muon=muon, offload=offload, head_apart=True)
    state = saved.resume(resumed)
    with closing(growing_loader(world, RowPosition(2, 0, state.row))) as loader:
        rows = DeviceRows(loader, num_steps=3, device=world.device, dtype=dtype, stop_step=4)
        for number in (2, 3):
            window = WindowSums(3, world.device)
            optimizer_step(resumed, rows.of_step(number), LR, window, world, with_metrics=False)
    on_main_first(world.is_main, lambda: shutil.rmtree(saved.root))
    return found | {
        # Which weights changed, by step.
        "changed": [
            sorted(name for name in after if not torch.equal(before[name], after[name]))
            for before, after in pairwise(weights)
        ],
        "names": sorted(weights[0]),
        "resumed": all(map(torch.equal, snapshot(model_engine), snapshot(resumed))),
        "losses": losses,
        "grad_norms": norms,
        "weights": {name: value.double().sum().item() for name, value in weights[-1].items()},
    }


def growing_loader(world: World, begin: RowPosition) -> RowLoader:
    return RowLoader(
        random_source(),
        row_tokens=ROW_TOKENS,
        rows_per_step=RowSchedule(ROWS_PER_STEP, 2, 3),
        rank=world.rank,
        world_size=world.size,
        seed=0,
        begin=begin,
    )


def plain_late_head(world: World) -> dict[str, Any]:
    """The steps of `late_head` with AdamW in PyTorch alone, row by row."""
    drafter, frozen = tiny_drafter(tiny_config(), torch.float32)
    head = [drafter.lm_head.weight]
    others = [weight for name, weight in drafter.named_parameters() if name != HEAD]
    groups: list[dict[str, Any]] = [{"params": others}, {"params": head, "lr": 0.0}]
    optimizer = torch.optim.AdamW(groups, LR, BETAS, weight_decay=WEIGHT_DECAY)
    losses, norms = [], []
    with closing(growing_loader(world, RowPosition())) as loader:
        for number in range(4):
            optimizer.param_groups[1]["lr"] = LR if number >= HEAD_START else 0.0
            batches = loader.batches(number)
            assert len(batches) == (2, 2, 2, 4)[number]
            parts = [rollout_loss(drafter, frozen, batch, num_steps=3, step_decay=0.8) for batch in batches]
            supervised = torch.stack([sums.num_rows[0] for _, sums in parts]).sum()
            loss = torch.stack([loss for loss, _ in parts]).sum() / supervised
            optimizer.zero_grad()
            loss.backward()
            norms.append(float(torch.nn.utils.clip_grad_norm_(drafter.parameters(), 0.5)))
            losses.append(float(loss))
            optimizer.step()
    weights = {name: weight.double().sum().item() for name, weight in drafter.named_parameters()}
    return {"losses": losses, "grad_norms": norms, "weights": weights}


def head_state(model_engine: Any) -> dict[str, Tensor]:
    """Adam's state of the draft head at ZeRO 0."""
    optimizer = model_engine.basic_optimizer
    return optimizer.state[next(group for group in optimizer.param_groups if group.get("head"))["params"][0]]


def late_heads(world: World, directory: Path, *, full: bool) -> dict[str, dict]:
    """A head that is trained late and rows that grow, at every ZeRO stage; with --full in more ways."""
    if world.size == 1:
        plain = {"plain": plain_late_head(world), "late-adamw-zero0": late_head(0, False, world, directory)}
        return plain | {"late-zero0": late_head(0, False, world, directory, MUON)}
    stages = (0, 1, 2, 3)
    runs = {f"late-zero{stage}": late_head(stage, False, world, directory, MUON) for stage in stages}
    adamw, offloaded = (stages, (1, 2, 3)) if full else ((1,), (3,))
    runs |= {f"late-adamw-bf16-zero{stage}": late_head(stage, True, world, directory) for stage in adamw}
    return runs | {
        f"late-offload-bf16-zero{stage}": late_head(stage, True, world, directory, MUON, offload=True)
        for stage in offloaded
    }
