"""The work of a run: tokens, steps, bytes, FLOPs, hours."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from data.samples import StateShape
from data.store.codec import Rows, encoded_bytes
from data.target.architecture import attention_flops, cached_elements
from eagle31.cost.flops import StepFlops, step_flops, typical_counts
from train.artifact import Artifact
from train.config.capture import CaptureMode
from train.config.data import SELF
from train.config.plan import PlanConfig
from train.config.run import RunConfig, Stage, waiting_bytes
from train.config.target import TargetEngine
from train.plan.cluster import Cluster
from train.plan.earlier import made_with
from train.plan.placement import TargetPlacement
from train.plan.sizes import RunSizes
from train.plan.target import ALONE_FRACTION, BATCHED_SEQUENCES, Parallelism, planned_dtype

_HOUR = 3600
_CACHED_BYTES = 2  # of an element of the key-value cache
# A layer's part of a decoding step in transformers, which launches its kernels one by one. An estimate.
_LAYER_SECONDS = 1e-3


@dataclass(frozen=True)
class Completions:
    """What the target writes before training, its own prompts included."""

    tokens: int
    prefill_flops: int
    decoding_flops: int
    steps: int  # of decoding, in all engines
    read_bytes: int  # from the GPUs' memory in these steps: the weights, and keys and values
    overhead_seconds: float  # that these steps take whatever the GPU

    def hours(self, plan: PlanConfig, num_gpus: int) -> float | None:
        """Return the hours on so many GPUs, at least; None is unknown."""
        if plan.tflops_per_gpu is None:
            return None if self.tokens else 0.0
        rate = plan.tflops_per_gpu * 1e12
        decoding = max(self.decoding_flops / rate, self.overhead_seconds)
        if plan.gpu_bandwidth_gb is not None:
            decoding = max(decoding, self.read_bytes / (plan.gpu_bandwidth_gb * 1e9))
        return (self.prefill_flops / rate + decoding) / num_gpus / _HOUR


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
    completions: Completions | None
    online: bool  # whether states go to training directly
    store_bytes: int | None  # of training states on disk; online, of what waits at most
    held_out_bytes: int  # of the states of held-out prompts, which are on disk in any mode


@dataclass(frozen=True)
class Hours:
    """Hours of the stages that take long; None is unknown."""

    regenerate: float | None  # at least: generation does not reach the rate of prefill and training
    capture: float | None
    train: float | None
    total: float | None
    how: str | None  # in words, the speed that they are computed with, if it is known


def data_summary(config: RunConfig) -> dict[str, Any]:
    """Return the summary of the data that a run with the same settings has made; empty without any."""
    found = [Artifact(Stage.data.value, {}, path) for path in made_with(config, Stage.data)]
    made = [one for one in found if one.finished]
    return made[-1].summary if made else {}


def run_work(sizes: RunSizes, summary: Mapping[str, Any]) -> Work:
    """Return the work of the full run.

    Args:
        summary: what the data stage recorded; empty before it has run.
    """
    config, train = sizes.config, sizes.config.train
    samples = _samples(config, summary)
    tokens = samples.tokens
    row_tokens = train.rows_per_step * train.row_tokens
    steps = train.max_steps
    if steps is None and tokens is not None:
        steps = max(1, tokens * train.num_epochs // row_tokens)
    trained = None if steps is None else steps * row_tokens
    counts = typical_counts(
        train.row_tokens,
        train.ttt_steps,
        samples.document,
        samples.fraction,
        sizes.drafter,
        train.max_drafts_per_row,
    )
    flops = step_flops(sizes.drafter, counts, config.drafter.train_lm_head)
    captured = trained if config.capture.mode is CaptureMode.online else tokens
    if config.capture.store is not None:
        captured = 0
    # A forward pass multiplies and adds once with every active parameter.
    attention = attention_flops(sizes.target_config, samples.document) / samples.document
    token_flops = 2 * sizes.target.parameters.active + attention
    # With answers of their own, the test prompts are captured with sampled ones too.
    held_out = config.data.num_validation + config.data.num_test * (1 + config.data.regenerate.enabled)
    return Work(
        tokens=tokens,
        tokens_from=samples.how,
        trained_tokens=trained,
        steps=steps,
        step_flops=flops,
        train_flops=None if trained is None else flops.total * trained // train.row_tokens,
        capture_flops=None if captured is None else round(token_flops * captured),
        completions=_completions(sizes, samples, token_flops),
        online=config.capture.mode is CaptureMode.online,
        store_bytes=_store_bytes(sizes, samples),
        held_out_bytes=_encoded_bytes(sizes, "exact", held_out * samples.document, samples.fraction),
    )


def run_hours(
    config: RunConfig, work: Work, cluster: Cluster, target: TargetPlacement, writers: TargetPlacement
) -> Hours:
    """Return the hours of a run, whose target captures in one place and may write in another."""
    rate = config.plan.tflops_per_gpu

    def at_rate(flops: int | None, num_gpus: int) -> float | None:
        return None if flops is None or rate is None else flops / (rate * 1e12 * _HOUR * num_gpus)

    completions, ranks = work.completions, cluster.num_ranks
    regenerate = None if completions is None else completions.hours(config.plan, writers.num_at_work)
    capture, train = at_rate(work.capture_flops, target.num_at_work), at_rate(work.train_flops, ranks)
    total = None
    if regenerate is not None and capture is not None and train is not None:
        at_once = work.online and target.kind != "shared"  # on different GPUs
        total = regenerate + (max(capture, train) if at_once else capture + train)
    how = None if rate is None else f"{rate:g} TFLOP/s per GPU"
    return Hours(regenerate, capture, train, total, how)


@dataclass(frozen=True)
class _Samples:
    """The training samples: as the data stage counted them, else as the recipe describes them."""

    tokens: int | None  # of all
    document: int  # of one, the mean
    fraction: float  # of the tokens, that are trained on
    how: str  # in words


def _samples(config: RunConfig, summary: Mapping[str, Any]) -> _Samples:
    if "num_tokens" in summary:
        tokens, written = summary["num_tokens"], summary["num_supervised_tokens"]
        return _Samples(tokens, tokens // summary["num_samples"], written / tokens, "measured")
    data, plan, limit = config.data, config.plan, config.data.max_samples
    document, how = plan.document_tokens or data.max_tokens, "by plan.document_tokens"
    if data.train == SELF:
        left = data.self_prompts.num - (data.num_validation + data.num_test if data.eval is None else 0)
        limit = min(limit or left, left)
    if limit is None:
        how = "unknown before the data stage, without data.max_samples"
        return _Samples(None, document, plan.assistant_fraction, how)
    if plan.document_tokens is None or data.train == SELF:  # of the prompts, some are left out
        how = "at most"
    how = f"{how}: {limit:,} samples of {document:,} tokens"
    return _Samples(limit * document, document, plan.assistant_fraction, how)


def _completions(sizes: RunSizes, samples: _Samples, token_flops: float) -> Completions | None:
    config, target = sizes.config, sizes.target_config
    if config.data.regenerate.enabled and samples.tokens is None:
        return None
    regenerated, prompts = samples.tokens or 0 if config.data.regenerate.enabled else 0, 0
    if config.data.train == SELF:
        prompts = config.data.self_prompts.num * config.data.self_prompts.max_new_tokens
    written = round(regenerated * samples.fraction) + prompts
    # What is read at the mean position of an answer that ends a document.
    context = samples.document * (1 - samples.fraction / 2)
    parallel = Parallelism.of(config.vllm.engine_args)
    cached, on_a_gpu = (
        cached_elements(target, parts) * _CACHED_BYTES * context for parts in (1, parallel.tensor)
    )
    in_transformers = config.target.engine is TargetEngine.hf
    layers = target.get_text_config().num_hidden_layers if in_transformers else 0
    at_once = config.data.regenerate.batch_size if in_transformers else BATCHED_SEQUENCES
    if not in_transformers and config.plan.gpu_memory_gb is not None:
        room = ALONE_FRACTION * config.plan.gpu_memory_gb * 1e9 - sizes.server(parallel).total(0)
        at_once = max(1, min(at_once, int(room / on_a_gpu)))
    steps = -(-written // at_once)
    return Completions(
        tokens=written,
        prefill_flops=round(token_flops * (regenerated + prompts - written)),
        decoding_flops=round(token_flops * written),
        steps=steps,
        read_bytes=round(steps * sizes.target.checkpoint_bytes + written * cached),
        overhead_seconds=steps * layers * _LAYER_SECONDS,
    )


def _store_bytes(sizes: RunSizes, samples: _Samples) -> int | None:
    capture = sizes.config.capture
    if capture.mode is CaptureMode.online:
        return waiting_bytes(sizes.config)
    if capture.store is not None:
        return 0
    if samples.tokens is None:
        return None
    return _encoded_bytes(sizes, capture.codec, samples.tokens, samples.fraction)


def _encoded_bytes(sizes: RunSizes, codec: str, num_tokens: int, fraction: float) -> int:
    drafter = sizes.drafter
    dtype = planned_dtype(sizes.config.target, sizes.target_config)
    rows = Rows(num_tokens, num_tokens, round(num_tokens * fraction))
    shape = StateShape(len(drafter.aux_layer_ids), drafter.target_hidden_size, dtype)
    return encoded_bytes(codec, rows, shape)
