"""The work of a run: tokens, steps, bytes, FLOPs, hours."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from data.store.codec import Encoding, Rows, encoded_bytes
from eagle31.cost.flops import StepFlops, step_flops, typical_counts
from eagle31.json_files import read_json
from eagle31.model.config import DrafterConfig
from train.config.capture import CaptureMode
from train.config.run import RunConfig
from train.planning.target import TargetPlan

_HOUR = 3600


@dataclass(frozen=True)
class Tokens:
    """The number of tokens in the training data, each counted once."""

    count: int | None  # None: unknown
    source: str  # in words, where the number is from

    @property
    def known(self) -> bool:
        return self.count is not None


@dataclass(frozen=True)
class WorkPlan:
    """The work of the full run; None is unknown."""

    tokens: Tokens
    trained_tokens: int | None  # over all epochs
    steps: int | None
    step_flops: StepFlops  # of one row
    train_flops: int | None
    capture_flops: int | None  # the target's forward passes
    store_bytes: int | None  # on disk; for online capture the limit of the spool
    train_hours: float | None
    capture_hours: float | None
    rate: str | None  # in words, the speed that the hours are computed with


def newest_data_summary(output_dir: Path) -> dict[str, Any]:
    """Return the summary of the newest data stage in this directory; empty if none has finished."""
    manifests = sorted(output_dir.glob("artifacts/data-*/stage.json"), key=lambda path: path.stat().st_mtime)
    return read_json(manifests[-1])["facts"] if manifests else {}


def measured_rate(output_dir: Path) -> float | None:
    """Return the tokens per second over all ranks that the newest training in this directory reached."""
    files = sorted(output_dir.glob("artifacts/train-*/metrics.jsonl"), key=lambda path: path.stat().st_mtime)
    lines = files[-1].read_text(encoding="utf-8").splitlines() if files else []
    records = [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]
    rates = [one["tokens_per_second"] for one in records if one.get("kind") == "train"]
    return rates[-1] if rates else None


def work_plan(
    config: RunConfig,
    drafter: DrafterConfig,
    target: TargetPlan,
    num_gpus: int,
    data_summary: Mapping[str, Any],
) -> WorkPlan:
    """Return the work of the full run.

    Args:
        num_gpus: number of GPUs that train.
        data_summary: what the data stage recorded; empty before it has run.
    """
    plan, train = config.plan, config.train
    tokens = data_tokens(config, data_summary)
    per_step = train.rows_per_step * train.row_tokens
    epochs = train.num_epochs
    steps = train.max_steps
    if steps is None and tokens.count is not None:
        steps = max(1, math.floor(tokens.count * epochs / per_step))
    trained = None if steps is None else steps * per_step
    flops = step_flops(
        drafter,
        typical_counts(
            train.row_tokens,
            train.ttt_steps,
            plan.document_tokens or config.data.max_tokens,
            plan.assistant_fraction,
        ),
        config.drafter.train_lm_head,
    )
    train_flops = None if steps is None else flops.total * steps * train.rows_per_step
    captured = trained if config.capture.mode is CaptureMode.online else tokens.count
    # A forward pass multiplies and adds once with every active parameter.
    capture_flops = None if captured is None else 2 * target.parameters.active * captured
    train_hours, capture_hours, rate = _hours(config, trained, train_flops, capture_flops, target, num_gpus)
    return WorkPlan(
        tokens=tokens,
        trained_tokens=trained,
        steps=steps,
        step_flops=flops,
        train_flops=train_flops,
        capture_flops=capture_flops,
        store_bytes=_store_bytes(config, drafter, tokens.count),
        train_hours=train_hours,
        capture_hours=capture_hours,
        rate=rate,
    )


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


def _hours(
    config: RunConfig,
    trained: int | None,
    train_flops: int | None,
    capture_flops: int | None,
    target: TargetPlan,
    num_gpus: int,
) -> tuple[float | None, float | None, str | None]:
    """Return the hours of training and of capture, and in words the speed that they are computed with."""
    tflops = config.plan.tflops_per_gpu
    capture = None
    if tflops is not None and capture_flops is not None:
        capture = capture_flops / (tflops * 1e12 * target.num_gpus) / _HOUR
    measured = measured_rate(Path(config.output_dir))
    if measured is not None and trained is not None:
        return trained / measured / _HOUR, capture, f"measured: {measured:,.0f} tokens/s"
    if tflops is None or train_flops is None:
        return None, capture, None
    return train_flops / (tflops * 1e12 * num_gpus) / _HOUR, capture, f"{tflops:g} TFLOP/s per GPU"
