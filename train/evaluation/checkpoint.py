"""Evaluation of any drafter checkpoint on given prompts, for `scripts/evaluate`."""

import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from data.capture.hf import open_capture
from data.conversations.choices import parse_template_kwargs
from data.conversations.perturbation import PromptSetting
from data.progress import tracked
from data.sampling import Sampling
from data.target.aux_layers import check_aux_layer_ids
from eagle31.errors import UserError
from train.config.data import MAX_TEMPERATURE
from train.config.evaluate import MAX_DRAFT_TOKENS
from train.config.target import TargetConfig
from train.drafter.published import check_trained_for, fetch_checkpoint, open_published
from train.evaluation.completing import CompletingTarget, packed
from train.evaluation.matrix import (
    Cell,
    complete_cells,
    matrix_result,
    parse_sources,
    prompt_source,
    render_cells,
)
from train.evaluation.measure import (
    Candidate,
    Conditions,
    candidate_of,
    common_positions,
    decode_in_transformers,
    evaluation_json,
    without_vllm,
)
from train.evaluation.replay import PromptAcceptance, replay_greedily, sampling_report
from train.target import Target


@dataclass(frozen=True)
class CheckpointEvaluation:
    """The settings of `scripts/evaluate`."""

    checkpoint: str
    target: str
    data: Sequence[str]  # see `parse_sources`
    num_prompts: int = 128  # of each source
    draft_tokens: int = 4
    max_new_tokens: int = 256
    decoded_prompts: int = 8  # of the prompts, those that are decoded too
    batch_size: int = 16  # prompts that the target completes in one forward pass
    temperature: float = 0.0  # above 0: measure at this temperature as well
    aux_layer_ids: list[int] | None = None
    output: Path | None = None  # the directory of the target's completions, which are not written again
    split: str = "test"
    subset: str | None = None
    prompt_column: str | None = None
    chat_template: str | None = None
    template_kwargs: list[str] | tuple[str, ...] = ()
    revision: str | None = None
    target_revision: str | None = None
    dtype: str = "auto"
    trust_remote_code: bool = False
    seed: int = 0


def evaluate_checkpoint(
    settings: CheckpointEvaluation, changes: Sequence[PromptSetting] | None = None
) -> dict[str, Any]:
    """Measure a checkpoint as the evaluate stage does.

    The target completes all prompts greedily in batches, and its states of the completions are replayed.

    Args:
        changes: measure each source under each of these settings, and decode nothing: the robustness matrix.

    Raises:
        UserError: the input is invalid; raised before the target is loaded. Or no completion has a draft.
    """
    check(settings)
    if not sys.stderr.isatty():
        transformers.utils.logging.disable_progress_bar()
    columns = prompt_source(
        "--data",
        settings.split,
        subset=settings.subset,
        prompt_column=settings.prompt_column,
    )
    sources = parse_sources(settings.data, columns)
    named = TargetConfig(
        model=settings.target,
        revision=settings.target_revision,
        dtype=settings.dtype,
        trust_remote_code=settings.trust_remote_code,
        chat_template=settings.chat_template,
    )
    target = Target(named, parse_template_kwargs(settings.template_kwargs))
    parts = target.parts
    ids = settings.aux_layer_ids and check_aux_layer_ids(settings.aux_layer_ids, parts.num_layers)
    directory = fetch_checkpoint(settings.checkpoint, settings.revision, "checkpoint")
    loaded = open_published(directory, parts, ids, "checkpoint")
    notes = list(loaded.notes)
    try:
        check_trained_for(loaded, parts)
    except (
        UserError
    ) as error:  # what a fine-tuned target accepts of its original's drafter may be of interest
        notes.append(f"the drafter was trained for other weights: {error}")
    drafter = loaded.drafter.config
    cells, left_out = render_cells(
        {name: list(source.reader()) for name, source in sources.items()},
        [PromptSetting()] if changes is None else changes,
        target.tokenizer,
        target.template_kwargs,
        num_prompts=settings.num_prompts,
        max_prompt_tokens=common_positions(parts, drafter) - settings.max_new_tokens,
        seed=settings.seed,
    )
    if not cells:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in left_out.items())
        raise UserError("--data", ", ".join(settings.data), f"Nothing can be measured: {reasons}")
    conditions = Conditions(settings.draft_tokens, settings.max_new_tokens, target.eos_token_ids)

    def sampling(temperature: float) -> Sampling:
        return Sampling(settings.max_new_tokens, target.eos_token_ids, temperature, settings.seed)

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    capture = open_capture(target.spec, parts, drafter.aux_layer_ids, device)
    completing = CompletingTarget(capture, parts.fingerprint, settings.batch_size)
    # A CPU may emulate bf16; elsewhere the drafter runs in the target's dtype, as in serving.
    dtype = torch.float32 if device.type == "cpu" else capture.dtype
    candidate = candidate_of(loaded, parts.head, device, dtype)
    result: dict[str, Any] = {"checkpoint": settings.checkpoint, "target": settings.target}
    with ExitStack() as stack:
        output = settings.output or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        completed = complete_cells(
            cells, completing, sampling(0.0), output / "greedy.jsonl", settings.draft_tokens
        )
        short = {one.name for one in cells} - {one.name for one in completed}
        left_out |= dict.fromkeys(sorted(short), "All of the target's completions are too short for a draft.")
        if not completed:
            remedy = "All of the target's completions are too short for a draft; give fewer."
            raise UserError("--draft-tokens", settings.draft_tokens, remedy)
        found = []
        for cell in tracked(completed, "replay", "cells"):
            rows = packed(cell.samples(completing))
            found.append((cell, replay_greedily(*candidate, rows, conditions.longest_draft)))
        result |= {
            "k": settings.draft_tokens,
            "cells": matrix_result(found, settings.draft_tokens),
            "aux_layer_ids": list(drafter.aux_layer_ids),
            "notes": [*notes, *(f"left out: {name}: {reason}" for name, reason in left_out.items())],
        }
        if changes is None:
            sampled = None
            if settings.temperature:
                how, file = sampling(settings.temperature), output / "sampled.jsonl"
                written = complete_cells(completed, completing, how, file, settings.draft_tokens)
                rows = packed(sample for cell in written for sample in cell.samples(completing))
                strata = tuple(len(cell.prompts) for cell in written)
                sampled = sampling_report(*candidate, rows, conditions.longest_draft, how, strata)
            mtp = without_vllm(parts)
            num_decoded = settings.decoded_prompts
            result |= _pooled(found, completing, candidate, sampled, mtp, conditions, num_decoded)
    return result


def _pooled(
    found: Sequence[tuple[Cell, PromptAcceptance]],
    completing: CompletingTarget,
    candidate: Candidate,
    sampled: dict[str, Any] | None,
    mtp: dict[str, Any] | None,
    conditions: Conditions,
    num_decoded: int,
) -> dict[str, Any]:
    """Return the results over the prompts of all sources, in the form of evaluation.json."""
    sources = [cell.domain for cell, _ in found for _ in cell.prompts]
    prompts = [prompt for cell, _ in found for prompt in cell.prompts]
    alone = [completion for cell, _ in found for completion in cell.completions]
    by_prompt = tuple(lengths for _, acceptance in found for lengths in acceptance.by_prompt)
    trained = PromptAcceptance(by_prompt, strata=tuple(len(cell.prompts) for cell, _ in found))
    chosen = of_all_sources(sources)[:num_decoded]
    decoded, samples = decode_in_transformers(completing, candidate, prompts, chosen, conditions)
    both = {"trained": trained.to_json(), "untrained": None}
    states = "the states of the same target"
    return evaluation_json(
        conditions, candidate, len(prompts), both, sampled, mtp, decoded, samples, alone, states
    )


def of_all_sources(sources: Sequence[str]) -> list[int]:
    """Return the indices of the prompts in an order that begins with the first one of each source."""
    return sorted(range(len(sources)), key=lambda index: sources[:index].count(sources[index]))


def check(settings: CheckpointEvaluation) -> None:
    """Raise UserError for settings outside their range."""
    for name in ("num_prompts", "draft_tokens", "max_new_tokens", "decoded_prompts", "batch_size"):
        if getattr(settings, name) < 1:
            raise UserError(f"--{name.replace('_', '-')}", getattr(settings, name), "Give at least 1.")
    if settings.draft_tokens > MAX_DRAFT_TOKENS:
        remedy = f"Give at most {MAX_DRAFT_TOKENS}: a longer draft is never accepted to its end."
        raise UserError("--draft-tokens", settings.draft_tokens, remedy)
    if settings.draft_tokens >= settings.max_new_tokens:
        remedy = (
            f"A draft must fit a completion: lower it, or raise --max-new-tokens ({settings.max_new_tokens})."
        )
        raise UserError("--draft-tokens", settings.draft_tokens, remedy)
    if not 0 <= settings.temperature <= MAX_TEMPERATURE:
        remedy = f"Give 0 (that temperature only), or at most {MAX_TEMPERATURE}."
        raise UserError("--temperature", settings.temperature, remedy)
