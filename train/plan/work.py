"""The work of a run: tokens, steps, bytes, FLOPs, hours."""

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf

from data.store.codec import Rows, encoded_bytes
from eagle31.cost.flops import StepFlops, step_flops, typical_counts
from eagle31.json_files import read_json
from train.config.capture import CaptureMode
from train.config.compose import RECIPES, choices
from train.config.data import SELF
from train.config.run import RunConfig
from train.plan.sizes import RunSizes
from train.plan.where import where_target_runs

_HOUR = 3600


@dataclass(frozen=True)
class Budget:
    """How much a run trains on."""

    max_samples: int | None
    num_epochs: int
    max_steps: int | None

    @staticmethod
    def of(config: Any) -> "Budget":
        """Return that of a configuration, or of a file in recipes/budget."""
        return Budget(config.capture.max_samples, config.train.num_epochs, config.train.max_steps)


@dataclass(frozen=True)
class Work:
    """The work of the full run; None is unknown."""

    tokens: int | None  # in the training data, each counted once
    tokens_from: str  # in words
    trained_tokens: int | None  # over all epochs
    steps: int | None
    step_flops: StepFlops  # of one row
    train_flops: int | None
    capture_flops: int | None  # the target's forward passes
    regenerated_tokens: int | None  # written by the target before training, its own prompts included
    regeneration_flops: int | None  # prefill included
    online: bool  # whether states go to training directly
    store_bytes: int | None  # on disk; online, of what waits at most


@dataclass(frozen=True)
class GpusAtWork:
    """The GPUs of a run, and those at work on each part of it; on a CPU, the processes."""

    all: int
    train: int
    target: int  # capture
    write: int  # regenerate
    at_once: bool  # whether the target captures while the drafter trains, on different GPUs


@dataclass(frozen=True)
class Hours:
    """Hours of the stages that take long; None is unknown."""

    regenerate: float | None  # at least: generation does not reach the rate of prefill and training
    capture: float | None
    train: float | None
    total: float | None
    how: str | None  # in words, the speed that they are computed with
    gpu_tokens: float | None  # trained tokens per hour and GPU of the whole run, those of the target included
    # Bytes per second of the disk with the store, below which the stages take longer; None without a store.
    written: float | None = None
    read: float | None = None


def newest_data_summary(output_dir: Path) -> dict[str, Any]:
    """Return the summary of the newest data stage in this directory; empty if none has finished."""
    manifests = sorted(output_dir.glob("artifacts/data-*/stage.json"), key=lambda path: path.stat().st_mtime)
    return read_json(manifests[-1])["facts"] if manifests else {}


def budget_works(sizes: RunSizes) -> dict[str, Work]:
    """Return the work of the run with each budget in recipes/budget, the smallest first."""
    names = choices("budget")
    budgets = {name: Budget.of(OmegaConf.load(RECIPES / "budget" / f"{name}.yaml")) for name in names}
    works = {name: run_work(sizes, {}, budget) for name, budget in budgets.items()}
    return dict(sorted(works.items(), key=lambda one: one[1].trained_tokens or 0))


def run_work(sizes: RunSizes, data_summary: Mapping[str, Any], budget: Budget | None = None) -> Work:
    """Return the work of the full run.

    Args:
        data_summary: what the data stage recorded; empty before it has run.
        budget: how much it trains on; None: what the configuration says.
    """
    config, train = sizes.config, sizes.config.train
    budget = budget or Budget.of(config)
    tokens, tokens_from = _data_tokens(config, data_summary, budget.max_samples)
    row_tokens = train.rows_per_step * train.row_tokens
    steps = budget.max_steps
    if steps is None and tokens is not None:
        steps = max(1, tokens * budget.num_epochs // row_tokens)
    trained = None if steps is None else steps * row_tokens
    flops = _row_flops(sizes)
    captured = trained if config.capture.mode is CaptureMode.online else tokens
    if config.capture.store is not None:
        captured = 0
    # A forward pass multiplies and adds once with every active parameter.
    token_flops = 2 * sizes.target.parameters.active
    regenerated = tokens if config.data.regenerate.enabled else 0
    fraction = config.plan.assistant_fraction
    prompts = config.data.self_prompts
    prompt_tokens = prompts.num * prompts.max_new_tokens if config.data.train == SELF else 0
    return Work(
        tokens=tokens,
        tokens_from=tokens_from,
        trained_tokens=trained,
        steps=steps,
        step_flops=flops,
        train_flops=None if trained is None else flops.total * trained // train.row_tokens,
        capture_flops=None if captured is None else token_flops * captured,
        regenerated_tokens=None if regenerated is None else round(regenerated * fraction) + prompt_tokens,
        regeneration_flops=None if regenerated is None else token_flops * (regenerated + prompt_tokens),
        online=config.capture.mode is CaptureMode.online,
        store_bytes=_store_bytes(sizes, tokens),
    )


def run_hours(config: RunConfig, work: Work, gpus: GpusAtWork) -> Hours:
    """Return the hours of a run."""
    rate, how = config.plan.tflops_per_gpu, None

    def at_rate(flops: int | None, num_gpus: int) -> float | None:
        return None if flops is None or rate is None else flops / (rate * 1e12 * _HOUR * num_gpus)

    if rate is not None:
        how = f"{rate:g} TFLOP/s per GPU"
    regenerate = 0.0 if work.regeneration_flops == 0 else at_rate(work.regeneration_flops, gpus.write)
    capture, train = at_rate(work.capture_flops, gpus.target), at_rate(work.train_flops, gpus.train)
    measured = _measured_rate(Path(config.output_dir))
    if measured is not None and work.trained_tokens is not None:
        train, how = work.trained_tokens / measured / _HOUR, f"measured: {measured:,.0f} tokens/s"
    total = gpu_tokens = None
    if regenerate is not None and capture is not None and train is not None:
        total = regenerate + (max(capture, train) if gpus.at_once else capture + train)
        gpu_tokens = (work.trained_tokens or 0) / (total * gpus.all)
    stored = 0 if work.online else work.store_bytes or 0
    read = stored * (work.trained_tokens or 0) / (work.tokens or 1)
    written_rate, read_rate = (
        num_bytes / hours / _HOUR if num_bytes and hours else None
        for num_bytes, hours in ((stored, capture), (read, train))
    )
    return Hours(regenerate, capture, train, total, how, gpu_tokens, written_rate, read_rate)


def _measured_rate(output_dir: Path) -> float | None:
    """Return the tokens per second over all ranks that the newest training in this directory reached."""
    files = sorted(output_dir.glob("artifacts/train-*/metrics.jsonl"), key=lambda path: path.stat().st_mtime)
    lines = files[-1].read_text(encoding="utf-8", errors="replace").splitlines() if files else []
    for line in reversed(lines):
        with suppress(ValueError, KeyError, TypeError):  # a line that was cut
            record = json.loads(line)
            if record["kind"] == "train":
                return float(record["tokens_per_second"])
    return None


def _data_tokens(
    config: RunConfig, data_summary: Mapping[str, Any], limit: int | None
) -> tuple[int | None, str]:
    """Return the tokens as measured, else as limited by the recipe."""
    if "num_tokens" in data_summary:
        return data_summary["num_tokens"], "measured"
    if config.data.train == SELF:
        limit = min(limit or config.data.self_prompts.num, config.data.self_prompts.num)
    if limit is None:
        return None, "unknown before the data stage, without capture.max_samples"
    mean = config.plan.document_tokens or config.data.max_tokens
    return limit * mean, f"at most: {limit:,} samples of {mean:,} tokens"


def _row_flops(sizes: RunSizes) -> StepFlops:
    config, drafter = sizes.config, sizes.drafter
    document_tokens = config.plan.document_tokens or config.data.max_tokens
    fraction = config.plan.assistant_fraction
    counts = typical_counts(
        config.train.row_tokens,
        config.train.ttt_steps,
        document_tokens,
        fraction,
        drafter,
        config.train.max_drafts_per_row,
    )
    return step_flops(drafter, counts, config.drafter.train_lm_head)


def _store_bytes(sizes: RunSizes, num_tokens: int | None) -> int | None:
    capture, drafter = sizes.config.capture, sizes.drafter
    if capture.mode is CaptureMode.online:
        return where_target_runs(sizes).waiting_bytes
    if capture.store is not None:
        return 0
    if num_tokens is None:
        return None
    supervised = round(num_tokens * sizes.config.plan.assistant_fraction)
    # bfloat16 if the dtype is unknown.
    dtype = getattr(torch, sizes.config.target.dtype, torch.bfloat16)
    return encoded_bytes(
        capture.codec,
        Rows(num_tokens, num_tokens, supervised),
        len(drafter.aux_layer_ids),
        drafter.target_hidden_size,
        dtype,
    )
