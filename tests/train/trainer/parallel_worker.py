"""Runs under torchrun: a few steps at every ZeRO stage on different rows; rank 0 writes the losses."""

import json
import shutil
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, replace
from datetime import timedelta
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from data.batches.device_rows import DeviceRows, StepRows
from data.batches.loader import RowLoader, RowPosition
from data.batches.row_schedule import RowSchedule
from data.samples import CapturedSample
from eagle31.training.objectives import Objective, StepWeights
from eagle31.training.step import rollout_loss
from eagle31.training.teacher_forced import greedy_hits
from tests.eagle31.tiny import random_batch, tiny_config, tiny_drafter
from train.checkpoint.engine_state import master_weights
from train.distributed import World, leave_process_group, on_main_first, sum_over_ranks, wait_for_ranks
from train.optim.matrices import HEAD, is_matrix
from train.tracking.tracker import flatten_metrics
from train.trainer import model_engine as engine_module
from train.trainer.average import WeightAverage
from train.trainer.checkpoints import CheckpointDirectory, TrainState
from train.trainer.guard import StepGuard
from train.trainer.loop import optimizer_step
from train.trainer.model_engine import (
    TrainedModule,
    deepspeed_config,
    ensure_process_group,
    full_state,
    initialize_model_engine,
)
from train.trainer.muon import MuonSettings
from train.trainer.validation import HELD_OUT, DriftDiagnosis, ReplayValidation
from train.trainer.window import WindowSums

ROWS_PER_STEP, NUM_STEPS, ROW_TOKENS = 4, 4, 48
EMA_DECAY = 0.2  # above the smaller values of the first steps
BETAS, WEIGHT_DECAY, HEAD_START = (0.9, 0.95), 0.1, 2
LR, MUON = 1e-2, MuonSettings(matrix_lr=3e-2, momentum=0.95)


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


def singular_values(before: dict[str, Tensor], after: dict[str, Tensor]) -> dict[str, list[float]]:
    """Smallest and largest singular value of each matrix's update, by its rate and scale, by name."""
    found = {}
    for name, old in before.items():
        if is_matrix(name, old.shape):
            scale = MUON.matrix_lr * max(1, old.shape[0] / old.shape[1]) ** 0.5
            values = torch.linalg.svdvals((old - after[name]) / scale)
            found[name] = [float(values.min()), float(values.max())]
    return found


def snapshot(model_engine: Any) -> list[Tensor]:
    """Copies of the float32 weights and of this rank's optimizer states."""
    states = map(model_engine.basic_optimizer.state.__getitem__, master_weights(model_engine))
    copies = [state[name].clone() for state in states for name in sorted(state)]
    return [*full_state(model_engine, keep=True).values(), *copies]


def refused_steps(model_engine: Any, step: StepRows, world: World) -> dict:
    """Steps with NaN on the last rank, with a norm beyond the bound, and one that is taken.

    Those that are refused must change nothing. The one that is taken must have orthogonal updates under Muon.
    """
    guard: StepGuard = model_engine.basic_optimizer.guard
    rows = list(step.rows)
    damaged = list(rows)
    if world.rank == world.size - 1:
        batch = rows[0].batch
        damaged[0] = replace(
            rows[0], batch=replace(batch, final_hidden_states=batch.final_hidden_states * torch.nan)
        )
    found: dict[str, Any] = {}
    before = snapshot(model_engine)
    for number, (some, bound) in enumerate([(damaged, None), (rows, 1e-3), (rows, 1e3)]):
        guard.max_norm_jump = bound
        weights = full_state(model_engine, keep=True)
        window, one = WindowSums(3, world.device), replace(step, rows=iter(some))
        optimizer_step(model_engine, one, LR, window, world, with_metrics=False)
        guard.record(number)
        after = snapshot(model_engine)
        found[f"unchanged {number}"] = all(map(torch.equal, before, after))
        found["singular values"] = singular_values(weights, full_state(model_engine, keep=True))
    return found | {"skipped": [asdict(one) for one in guard.collect(wait=True)]}


def reference_step(objective: Objective) -> dict[str, float]:
    """The first step's loss and the norm of its gradient, divided by the positions that the loss counts."""
    drafter, frozen = tiny_drafter(tiny_config(), torch.float32)
    loader = RowLoader(MemorySource(), row_tokens=ROW_TOKENS, rows_per_step=ROWS_PER_STEP, seed=0)
    parts = [
        rollout_loss(drafter, frozen, batch, num_steps=3, step_decay=0.8, objective=objective)
        for batch in loader.batches(0)
    ]
    loader.close()
    counted = torch.stack([sums.num_rows[0] for _, sums in parts]).sum()
    loss = torch.stack([loss for loss, _ in parts]).sum() / counted
    loss.backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in drafter.parameters() if p.grad is not None])
    return {"loss": float(loss), "grad_norm": float(norm)}


class CheckedAverage:
    """The average of an engine's weights, and what it has to be by the formula, from the full weights."""

    def __init__(self, model_engine: Any) -> None:
        self.model_engine = model_engine
        self.average = WeightAverage(model_engine, EMA_DECAY)
        self.expected: dict[str, Tensor] = {}

    def update(self) -> None:
        n = self.average.num_updates
        share = 1 - min(EMA_DECAY, (1 + n) / (10 + n))
        for name, weight in full_state(self.model_engine, keep=True).items():
            before = self.expected.get(name, weight)
            self.expected[name] = before + share * (weight - before)
        self.average.update(torch.tensor(False))

    def check(self) -> dict[str, float]:
        """Check that the engine has the averages within the context alone; return their sums."""
        before = [*snapshot(self.model_engine), *computed_with(self.model_engine)]
        with self.average.in_place_of_weights():
            held = full_state(self.model_engine, keep=True)
            used = computed_with(self.model_engine)
        after = [*snapshot(self.model_engine), *computed_with(self.model_engine)]
        assert all(map(torch.equal, before, after))
        for (name, weight), one in zip(held.items(), used, strict=True):
            torch.testing.assert_close(weight, self.expected[name], rtol=1e-5, atol=1e-7)
            assert torch.equal(weight.to(one.dtype), one), name
        assert not all(map(torch.equal, used, computed_with(self.model_engine)))
        states = self.average.averages
        kept = [one.clone() for one in states]
        self.average.update(torch.tensor(True))
        assert all(map(torch.equal, kept, states))
        self.average.num_updates -= 1
        return {name: value.double().sum().item() for name, value in held.items()}


def computed_with(model_engine: Any) -> list[Tensor]:
    """Copies of the weights that the forward pass reads."""
    found = []
    for parameter in model_engine.module.drafter.parameters():
        with deepspeed.zero.GatheredParameters([parameter] if hasattr(parameter, "ds_id") else []):
            found.append(parameter.detach().clone().cpu())
    return found


def new_engine(
    zero_stage: int,
    bf16: bool,
    world: World,
    objective: Objective | None = None,
    muon: MuonSettings | None = None,
    *,
    offload: bool = False,
    head_apart: bool = False,
) -> Any:
    drafter, frozen = tiny_drafter(tiny_config(), torch.bfloat16 if bf16 else torch.float32)
    module = TrainedModule(drafter.float(), frozen, num_steps=3, step_decay=0.8, objective=objective)
    config = deepspeed_config(
        zero_stage=zero_stage,
        bf16=bf16,
        micro_batches=-(-ROWS_PER_STEP // world.size),
        world_size=world.size,
        offload_optimizer=offload,
        offload_parameters=offload and zero_stage == 3,
    )
    # By default DeepSpeed partitions no parameter that is as small as those here.
    config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    return initialize_model_engine(
        module,
        config,
        lr=LR,
        betas=BETAS,
        eps=1e-8,
        weight_decay=WEIGHT_DECAY if head_apart else 0.0,
        max_grad_norm=0.5,
        muon=muon,
        head_apart=head_apart,
    )


def losses_at(
    zero_stage: int,
    bf16: bool,
    world: World,
    objective: Objective | None = None,
    muon: MuonSettings | None = None,
    *,
    offload: bool = False,
) -> dict:
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
    model_engine = new_engine(zero_stage, bf16, world, objective, muon, offload=offload)
    dtype = torch.bfloat16 if bf16 else torch.float32
    rows = DeviceRows(
        loader,
        num_steps=3,
        device=world.device,
        dtype=dtype,
        stop_step=NUM_STEPS + 1,
    )
    losses, norms, stops = [], [], []
    average = CheckedAverage(model_engine)
    for step in range(NUM_STEPS):
        window = WindowSums(3, world.device)
        # The last rank is told to stop at step 2.
        counts, norm = optimizer_step(
            model_engine,
            rows.of_step(step),
            LR,
            window,
            world,
            with_metrics=step % 2 == 0,
            stop=step == 2 and world.rank == world.size - 1,
        )
        average.update()
        num_supervised, num_stopping = counts.read()
        stops.append(num_stopping)
        metrics = window.metrics(world)
        # The loss may count fewer than there are.
        assert (num_supervised == metrics["supervised_positions"]) == (objective is None)
        assert all(0 <= depth["agreement"] <= 1 for depth in metrics["depth"])
        losses.append(metrics["loss"])
        norms.append(float(norm))
    further = rows.of_step(NUM_STEPS)
    assert stops == [0, 0, 1, 0]
    weights = full_state(model_engine, keep=world.is_main)
    assert bool(weights) == world.is_main
    validation = ReplayValidation({HELD_OUT: validation_samples()}, ROW_TOKENS, 3, world)
    stats = validation.run(model_engine.module, world.device, dtype)[HELD_OUT]
    partitioned = zero_stage == 3
    diagnosis = DriftDiagnosis(validation_samples(), 99, 8, world, on_every_rank=partitioned)
    drift = diagnosis.run(model_engine.module, world.device, dtype)
    assert (drift is not None) == (world.is_main or partitioned)
    averages = average.check()
    further_rows = list(further.rows)
    saved = CheckpointDirectory(Path(f"{sys.argv[1]}.checkpoints"), 1, world)
    resumes = muon is not None and not offload
    if resumes:
        saved.save(model_engine, TrainState(step=NUM_STEPS), average.average)
    refused = refused_steps(model_engine, replace(further, rows=iter(further_rows)), world)
    loader.close()
    found: dict[str, Any] = {}
    if muon is not None:
        found["orthogonalized"] = int(
            sum_over_ranks(torch.tensor(model_engine.basic_optimizer.num_orthogonalized))
        )
    if resumes:
        resumed = new_engine(zero_stage, bf16, world, objective, muon)
        resumed_average = WeightAverage(resumed, EMA_DECAY)
        assert saved.resume(resumed, resumed_average).step == NUM_STEPS
        ours, theirs = average.average, resumed_average
        assert theirs.num_updates == ours.num_updates == NUM_STEPS
        assert all(map(torch.equal, ours.averages, theirs.averages))
        one = replace(further, rows=iter(further_rows))
        optimizer_step(resumed, one, LR, WindowSums(3, world.device), world, with_metrics=False)
        found["resumed"] = all(map(torch.equal, snapshot(model_engine), snapshot(resumed)))
        on_main_first(world.is_main, lambda: shutil.rmtree(saved.root))
    return found | {
        "replay": {str(k): [one.num_drafts, *one.accepted_per_position] for k, one in stats.items()},
        "drift": drift and flatten_metrics({"kind": "drift", "step": NUM_STEPS} | drift),
        "averages": averages,
        "losses": losses,
        "grad_norms": norms,
        "weights": {name: value.double().sum().item() for name, value in weights.items()},
        "rounded": all(torch.equal(value, value.bfloat16().float()) for value in weights.values()),
        "refused": refused,
    }


def late_head(
    zero_stage: int, bf16: bool, world: World, muon: MuonSettings | None = None, *, offload: bool = False
) -> dict[str, Any]:
    """Four steps with 2, 2, 2 and 4 rows; the last two change the draft head. They are also resumed."""
    dtype = torch.bfloat16 if bf16 else torch.float32
    model_engine = new_engine(zero_stage, bf16, world, muon=muon, offload=offload, head_apart=True)
    saved = CheckpointDirectory(Path(f"{sys.argv[1]}.late"), 1, world)
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
        MemorySource(),
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


def late_heads(world: World, *, full: bool) -> dict[str, dict]:
    """A head that is trained late and rows that grow, at every ZeRO stage; with --full in more ways."""
    if world.size == 1:
        plain = {"plain": plain_late_head(world), "late-adamw-zero0": late_head(0, False, world)}
        return plain | {"late-zero0": late_head(0, False, world, MUON)}
    stages = (0, 1, 2, 3)
    runs = {f"late-zero{stage}": late_head(stage, False, world, MUON) for stage in stages}
    adamw, offloaded = (stages, (1, 2, 3)) if full else ((1,), (3,))
    runs |= {f"late-adamw-bf16-zero{stage}": late_head(stage, True, world) for stage in adamw}
    return runs | {
        f"late-offload-bf16-zero{stage}": late_head(stage, True, world, MUON, offload=True)
        for stage in offloaded
    }


def muon_runs(stages: Sequence[int], world: World, *, full: bool) -> dict[str, dict]:
    """Muon at each ZeRO stage; in bf16 and offloaded at those that differ most, or at all of them."""
    bf16, offloaded = ((0, 1, 2, 3), (1, 2, 3)) if full else ((1,), (3,))
    runs = {f"muon-zero{stage}": losses_at(stage, False, world, muon=MUON) for stage in stages}
    if world.size == 1 and not full:
        return runs
    runs |= {f"muon-bf16-zero{stage}": losses_at(stage, True, world, muon=MUON) for stage in bf16}
    return runs | {
        f"muon-bf16-offload-zero{stage}": losses_at(stage, True, world, muon=MUON, offload=True)
        for stage in offloaded
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
    assert group._get_backend(world.device).options._timeout > timedelta(
        minutes=2.0
    )  # the watch names the rank first
    # The rows of validation have 1 and 12 chunks.
    engine_module.greedy_hits = partial(greedy_hits, chunk_rows=3)
    # One process with the stages that differ most, two with all of them.
    stages = (0, 1, 2, 3) if world.size > 1 else (0, 3)
    results = {f"zero{stage}": losses_at(stage, False, world) for stage in stages}
    results |= {f"bf16-zero{stage}": losses_at(stage, True, world) for stage in sorted({*stages, 1})}
    results |= muon_runs(stages, world, full="--full" in sys.argv)
    results |= late_heads(world, full="--full" in sys.argv)
    if world.size > 1:
        by_reach: dict[str, Any] = {"step_weights": StepWeights.reach, "reach_smoothing": 0.9}
        objective = Objective(count_outside_vocab=False, **by_reach)
        results["inside"] = losses_at(2, False, world, objective) | {"reference": reference_step(objective)}
    if world.is_main:
        Path(sys.argv[1]).write_text(json.dumps(results))
    leave_process_group()


if __name__ == "__main__":
    main()
