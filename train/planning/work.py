"""The work of a run: tokens, steps, bytes, FLOPs, hours."""

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch

from data.batches.row_schedule import steps_within
from data.store.codec import Encoding, Rows, encoded_bytes
from data.target.architecture import ParameterCounts
from eagle31.cost.flops import StepFlops, step_flops, typical_counts
from eagle31.errors import UserError
from eagle31.json_files import read_sealed_json
from eagle31.model.config import DrafterConfig
from eagle31.training.curriculum import rollout_phases
from train.config.capture import CaptureMode
from train.config.run import RunConfig
from train.config.training import TrainConfig, objective_of, row_schedule_of

_HOUR = 3600
_SHARES = 10**6  # steps of a long run, of which the phases take their fractions


@dataclass(frozen=True)
class Tokens:
    """The number of tokens in the training data, each counted once."""

    count: int | None  # None: unknown
    source: str  # in words, where the number is from

    @property
    def known(self) -> bool:
        return self.count is not None


@dataclass(frozen=True)
class Regeneration:
    """The completions that replace the data's answers, before training."""

    prompt_tokens: int
    generated_tokens: int
    prefill_flops: int
    flops: int  # prefill included


@dataclass(frozen=True)
class WorkPlan:
    """The work of the full run; None is unknown."""

    tokens: Tokens
    trained_tokens: int | None  # over all epochs
    steps: int | None
    mean_rows_per_step: float | None  # None where every step has as many
    step_flops: StepFlops  # of one row
    train_flops: int | None
    capture_flops: int | None  # the target's forward passes
    regeneration: Regeneration | None  # None without it, and where the number of tokens is unknown
    store_bytes: int | None  # on disk; for online capture the limit of the spool


@dataclass(frozen=True)
class Gpus:
    """The GPUs of a run."""

    train: int
    target: int
    # Whether the target and the drafter compute at the same time, on different GPUs.
    at_once: bool


@dataclass(frozen=True)
class Hours:
    """Hours of the stages that take long; None is unknown."""

    regenerate: float | None  # 0 without regeneration
    is_bound: bool  # regenerate is only a lower bound
    capture: float | None
    train: float | None
    total: float | None
    how: str | None  # in words, the speed that they are computed with


def newest_data_summary(output_dir: Path) -> dict[str, Any]:
    """Return the summary of the newest data stage in this directory; empty if none has finished."""
    manifests = sorted(output_dir.glob("artifacts/data-*/stage.json"), key=lambda path: path.stat().st_mtime)
    for path in reversed(manifests):
        with suppress(UserError):  # the stage is made again
            return read_sealed_json(path)["facts"]
    return {}


def measured_rate(output_dir: Path) -> float | None:
    """Return the tokens per second over all ranks that the newest training in this directory reached."""
    files = sorted(output_dir.glob("artifacts/train-*/metrics.jsonl"), key=lambda path: path.stat().st_mtime)
    lines: list[str] = []
    if files and files[-1].is_file():
        lines = files[-1].read_text(encoding="utf-8", errors="replace").splitlines()
    for line in reversed(lines):
        with suppress(ValueError, KeyError, TypeError):  # a line that was cut or altered
            record = json.loads(line)
            if record["kind"] == "train":
                return float(record["tokens_per_second"])
    return None


def work_plan(
    config: RunConfig, drafter: DrafterConfig, parameters: ParameterCounts, data_summary: Mapping[str, Any]
) -> WorkPlan:
    """Return the work of the full run.

    Args:
        parameters: the target's.
        data_summary: what the data stage recorded; empty before it has run.
    """
    train = config.train
    tokens = data_tokens(config, data_summary)
    steps = train.max_steps
    if steps is None and tokens.count is not None:
        rows = tokens.count * train.num_epochs // train.row_tokens
        steps = max(1, steps_within(rows, partial(row_schedule_of, train)))
    num_rows = None if steps is None else row_schedule_of(train, steps).before(steps)
    trained = None if num_rows is None else num_rows * train.row_tokens
    flops = row_flops(config, drafter)
    train_flops = None if num_rows is None else flops.total * num_rows
    captured = trained if config.capture.mode is CaptureMode.online else tokens.count
    if config.capture.store is not None:
        captured = 0
    # A forward pass multiplies and adds once with every active parameter.
    token_flops = 2 * parameters.active
    return WorkPlan(
        tokens=tokens,
        trained_tokens=trained,
        steps=steps,
        mean_rows_per_step=mean_rows_per_step(train) if row_schedule_of(train, _SHARES).grows else None,
        step_flops=flops,
        train_flops=train_flops,
        capture_flops=None if captured is None else token_flops * captured,
        regeneration=_regeneration(config, tokens.count, token_flops),
        store_bytes=_store_bytes(config, drafter, tokens.count),
    )


def mean_rows_per_step(train: TrainConfig) -> float:
    """Return the rows of an optimizer step, on average over the steps of the run."""
    return row_schedule_of(train, _SHARES).before(_SHARES) / _SHARES


def row_flops(config: RunConfig, drafter: DrafterConfig) -> StepFlops:
    """Return the FLOPs of one row, on average over the rows of the run."""
    plan, train = config.plan, config.train
    document_tokens = plan.document_tokens or config.data.max_tokens
    total = dict.fromkeys((one.name for one in fields(StepFlops)), 0.0)
    schedule, begin = row_schedule_of(train, _SHARES), 0.0
    for depth, steps in rollout_phases(train.ttt_steps, train.ttt_curriculum_fraction):
        end = begin + steps
        before = [schedule.before(round(_SHARES * one)) for one in (begin, end)]
        fraction, begin = (before[1] - before[0]) / schedule.before(_SHARES), end
        counts = typical_counts(train.row_tokens, depth, document_tokens, plan.assistant_fraction, drafter)
        full = objective_of(train).needs_full_vocabulary
        flops = step_flops(drafter, counts, config.drafter.train_lm_head, full)
        for name in total:
            total[name] += fraction * getattr(flops, name)
    return StepFlops(**{name: round(value) for name, value in total.items()})


def _regeneration(config: RunConfig, num_tokens: int | None, token_flops: int) -> Regeneration | None:
    """Return the work of writing every answer again, as long as the data's."""
    if num_tokens is None or not config.data.regenerate.enabled:
        return None
    generated = round(num_tokens * config.plan.assistant_fraction)
    prompts = num_tokens - generated
    return Regeneration(prompts, generated, token_flops * prompts, token_flops * num_tokens)


def hours(config: RunConfig, work: WorkPlan, gpus: Gpus) -> Hours:
    """Return the hours of a run on these GPUs.

    Each prompt token of regeneration is prefilled once, because earlier turns of a conversation are in the
    prefix cache, at `plan.tflops_per_gpu`. The rest is generated at
    `plan.decode_tokens_per_second_per_gpu`; without it the hours are those of the FLOPs, a lower bound.
    """
    plan = config.plan
    rate = None if plan.tflops_per_gpu is None else plan.tflops_per_gpu * 1e12 * _HOUR
    capture = _at(work.capture_flops, rate, gpus.target)
    train = _at(work.train_flops, rate, gpus.train)
    how = None if rate is None else f"{plan.tflops_per_gpu:g} TFLOP/s per GPU"
    measured = measured_rate(Path(config.output_dir))
    if measured is not None and work.trained_tokens is not None:
        train, how = work.trained_tokens / measured / _HOUR, f"measured: {measured:,.0f} tokens/s"
    regenerate: float | None = 0.0
    is_bound = False
    if work.regeneration is not None:
        regenerate = _at(work.regeneration.flops, rate, gpus.target)
        decode = plan.decode_tokens_per_second_per_gpu
        is_bound = decode is None
        if decode is not None:
            prefill = _at(work.regeneration.prefill_flops, rate, gpus.target)
            speed = decode * gpus.target * _HOUR
            regenerate = None if prefill is None else prefill + work.regeneration.generated_tokens / speed
    total = None
    if regenerate is not None and capture is not None and train is not None:
        total = regenerate + (max(capture, train) if gpus.at_once else capture + train)
    return Hours(regenerate, is_bound, capture, train, total, how)


def data_tokens(config: RunConfig, data_summary: Mapping[str, Any]) -> Tokens:
    """Return the tokens as measured, else as given, else as limited by the recipe."""
    limit, longest = config.capture.max_samples, config.data.max_tokens
    measured = data_summary.get("num_tokens")
    if measured is not None:
        num_samples = data_summary["num_samples"]
        taken = num_samples if limit is None else min(limit, num_samples)
        return Tokens(measured * taken // num_samples, "measured")
    if config.plan.num_tokens is not None:
        return Tokens(config.plan.num_tokens, "plan.num_tokens")
    if limit is not None:
        mean = config.plan.document_tokens or longest
        return Tokens(limit * mean, f"at most: {limit:,} samples of {mean:,} tokens")
    return Tokens(None, "unknown before the data stage; set plan.num_tokens")


def _store_bytes(config: RunConfig, drafter: DrafterConfig, num_tokens: int | None) -> int | None:
    capture = config.capture
    if capture.mode is CaptureMode.online:
        return int(capture.spool_gb * 1e9)
    if capture.store is not None:
        return 0
    if num_tokens is None:
        return None
    supervised = round(num_tokens * config.plan.assistant_fraction)
    num_final = supervised if capture.final_states == "supervised" else num_tokens
    # bfloat16 if the dtype is unknown.
    dtype = getattr(torch, config.target.dtype, torch.bfloat16)
    return encoded_bytes(
        Encoding(capture.codec, capture.final_states),
        Rows(num_tokens, num_tokens, num_final),
        len(drafter.aux_layer_ids),
        drafter.target_hidden_size,
        dtype,
    )


def _at(flops: int | None, rate: float | None, gpus: int) -> float | None:
    return None if flops is None or rate is None else flops / (rate * gpus)
