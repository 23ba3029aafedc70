"""Evaluation of any drafter checkpoint on given prompts, for `scripts/evaluate`."""

import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedTokenizerBase

from data.capture.hf import HiddenStateCapture, check_head
from data.conversations.choices import parse_template_kwargs
from data.conversations.held_out import choose_prompts
from data.conversations.perturbation import PromptSetting
from data.conversations.prompts import prompt_messages, render_prompt
from data.conversations.schemas import Conversation
from data.progress import tracked
from data.sampling import Sampling
from data.target.aux_layers import check_aux_layer_ids
from data.target.cached_decoding import TargetDecoder
from data.target.loading import load_target
from data.target.modules import locate
from data.target.parts import TargetParts, load_target_parts
from data.target.spec import TargetSpec
from data.target.tokenizer import load_tokenizer
from eagle31.errors import UserError
from eagle31.export.read import LoadedExport
from eagle31.json_files import write_json
from eagle31.model.drafter import Drafter
from eagle31.model.frozen import FrozenParts
from train.config.evaluate import MAX_DRAFT_TOKENS, MAX_TEMPERATURE
from train.drafter.published import fetch_checkpoint, open_published
from train.evaluation.agreement import agreement_report, drafted_completions
from train.evaluation.decoding import PassResults, decode_prompts, decoding_report, engine_name
from train.evaluation.matrix import (
    complete_cells,
    matrix_result,
    parse_sources,
    prompt_source,
    render_cells,
)
from train.evaluation.replay import CompletingTarget, longest_draft, packed, replay_greedily, sampling_report


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
    json: Path | None = None
    output: Path | None = None  # the directory of the target's completions, which are not written again
    split: str = "test"
    subset: str | None = None
    prompt_column: str | None = None
    response_column: str | None = None
    chat_template: str | None = None
    template_kwargs: list[str] | tuple[str, ...] = ()
    revision: str | None = None
    target_revision: str | None = None
    dtype: str = "auto"
    trust_remote_code: bool = False
    seed: int = 0

    @property
    def spec(self) -> TargetSpec:
        return TargetSpec(
            self.target, self.target_revision, self.dtype, trust_remote_code=self.trust_remote_code
        )


@dataclass(frozen=True)
class OpenedCheckpoint:
    """The drafter and its target in memory."""

    drafter: Drafter
    frozen: FrozenParts
    completing: CompletingTarget
    target: TargetDecoder
    dtype: torch.dtype  # of the target
    notes: tuple[str, ...]


@dataclass(frozen=True)
class CheckedInput:
    """What an evaluation reads before it loads the target."""

    parts: TargetParts
    loaded: LoadedExport
    tokenizer: PreTrainedTokenizerBase
    template_kwargs: dict[str, Any]
    conversations: dict[str, Sequence[Conversation]]  # by source
    eos_token_ids: tuple[int, ...]


def evaluate_checkpoint(settings: CheckpointEvaluation) -> dict[str, Any]:
    """Measure a checkpoint as the evaluate stage does; write the results to `settings.json` if it is set.

    The target completes all prompts greedily in batches, and its states of the completions are replayed.

    Raises:
        UserError: the input is invalid; raised before the target is loaded.
    """
    checked = read_input(settings)
    prompts = [
        (source, render_prompt(checked.tokenizer, prompt_messages(one), one.tools, checked.template_kwargs))
        for source, conversations in checked.conversations.items()
        for one in choose_prompts(conversations, settings.num_prompts, settings.seed)
    ]
    if not prompts:
        raise UserError("--data", ", ".join(settings.data), "It has no prompts.")
    opened = open_target(settings, checked.parts, checked.loaded)
    with _scratch(settings.output) as scratch:
        return _written(settings, measured(settings, opened, prompts, checked.eos_token_ids, scratch))


def evaluate_matrix(settings: CheckpointEvaluation, conditions: Sequence[PromptSetting]) -> dict[str, Any]:
    """Measure a checkpoint on each source under each condition; write the results as `evaluate_checkpoint`.

    Raises:
        UserError: the input is invalid, or no cell is left; raised before the target is loaded.
    """
    checked = read_input(settings)
    cells, left_out = render_cells(
        checked.conversations,
        conditions,
        checked.tokenizer,
        checked.template_kwargs,
        num_prompts=settings.num_prompts,
        max_prompt_tokens=_max_positions(checked) - settings.max_new_tokens,
        seed=settings.seed,
    )
    if not cells:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in left_out.items())
        raise UserError("--data", ", ".join(settings.data), f"No cell can be measured: {reasons}")
    opened = open_target(settings, checked.parts, checked.loaded)
    greedy = Sampling(settings.max_new_tokens, checked.eos_token_ids, 0.0, settings.seed)
    longest = longest_draft(settings.draft_tokens)
    with _scratch(settings.output) as scratch:
        output = scratch / "matrix.jsonl"
        completed = complete_cells(cells, opened.completing, greedy, output, settings.draft_tokens)
        left_out |= {
            name: "All of the target's completions are too short for a draft."
            for name in [one.name for one in cells]
            if name not in [one.name for one in completed]
        }
        found = []
        for cell in tracked(completed, "replay", "cells"):
            rows = packed(cell.samples(opened.completing))
            found.append((cell, replay_greedily(opened.drafter, opened.frozen, rows, longest)))
    result = {
        "checkpoint": settings.checkpoint,
        "target": settings.target,
        "k": settings.draft_tokens,
        "cells": matrix_result(found, settings.draft_tokens),
        "left_out": left_out,
    }
    return _written(settings, result)


def read_input(settings: CheckpointEvaluation) -> CheckedInput:
    """Read and check everything but the target's weights.

    Raises:
        UserError: the input is invalid.
    """
    check(settings)
    if not sys.stderr.isatty():
        transformers.utils.logging.disable_progress_bar()
    columns = prompt_source(
        "--data",
        settings.split,
        subset=settings.subset,
        prompt_column=settings.prompt_column,
        response_column=settings.response_column,
    )
    sources = parse_sources(settings.data, columns)
    parts = load_target_parts(settings.spec)
    ids = settings.aux_layer_ids and check_aux_layer_ids(settings.aux_layer_ids, parts.num_layers)
    directory = fetch_checkpoint(settings.checkpoint, settings.revision, "checkpoint")
    loaded = open_published(directory, parts, ids, "checkpoint")
    tokenizer = load_tokenizer(settings.spec, settings.chat_template)
    return CheckedInput(
        parts,
        loaded,
        tokenizer,
        parse_template_kwargs(settings.template_kwargs),
        {name: list(source.reader()) for name, source in sources.items()},
        tuple(sorted(set(parts.eos_token_ids) | {tokenizer.eos_token_id} - {None})),
    )


def _max_positions(checked: CheckedInput) -> int:
    """Return the positions that target and drafter both have."""
    drafter = checked.loaded.drafter.config.max_position_embeddings
    target = getattr(checked.parts.config.get_text_config(), "max_position_embeddings", None)
    return min(target or drafter, drafter)


@contextmanager
def _scratch(output: Path | None) -> Iterator[Path]:
    if output is not None:
        yield output
        return
    with tempfile.TemporaryDirectory(prefix="eagle31-evaluate-") as directory:
        yield Path(directory)


def _written(settings: CheckpointEvaluation, result: dict[str, Any]) -> dict[str, Any]:
    if settings.json is not None:
        write_json(settings.json, result)
    return result


def open_target(settings: CheckpointEvaluation, parts: TargetParts, loaded: LoadedExport) -> OpenedCheckpoint:
    """Load the target, and put the drafter where it runs."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = load_target(settings.spec, device)
    modules = locate(model)
    # A CPU may emulate bf16; elsewhere the drafter runs in the target's dtype, as in serving.
    dtype = torch.float32 if device.type == "cpu" else model.dtype
    drafter = loaded.drafter.to(device, dtype)
    draft_ids = loaded.draft_target_ids
    frozen = FrozenParts(
        loaded.embed_tokens.to(device, dtype),
        parts.head.to(device),
        None if draft_ids is None else draft_ids.to(device),
        lm_head=None,
    )
    capture = HiddenStateCapture(model, modules, drafter.config.aux_layer_ids)
    check_head(capture, parts.head)
    return OpenedCheckpoint(
        drafter,
        frozen,
        CompletingTarget(capture, parts.fingerprint, settings.batch_size),
        TargetDecoder(model, modules, drafter.config.aux_layer_ids),
        model.dtype,
        tuple(loaded.notes),
    )


def measured(
    settings: CheckpointEvaluation,
    opened: OpenedCheckpoint,
    given: Sequence[tuple[str, Sequence[int]]],
    eos_token_ids: tuple[int, ...],
    scratch: Path,
) -> dict[str, Any]:
    """Return the results, in the form of evaluation.json.

    Args:
        given: the source and the token ids of each prompt, source by source.

    Raises:
        UserError: all completions are too short for a draft.
    """
    candidate, completing = (opened.drafter, opened.frozen), opened.completing
    longest = longest_draft(settings.draft_tokens)
    greedy = Sampling(settings.max_new_tokens, eos_token_ids, 0.0, settings.seed)
    sources, prompts = ([*one] for one in zip(*given, strict=True))
    completions = completing.complete(prompts, greedy, scratch / "greedy.jsonl")
    if (longest_completion := max(map(len, completions))) <= settings.draft_tokens:
        remedy = f"The longest of the target's completions has {longest_completion} tokens; give fewer."
        raise UserError("--draft-tokens", settings.draft_tokens, remedy)
    # Where a completion ends at its first token there is no draft.
    kept = [index for index, completion in enumerate(completions) if len(completion) > 1]
    sources, prompts, completions = ([one[i] for i in kept] for one in (sources, prompts, completions))
    trained = replay_greedily(*candidate, packed(completing.samples(prompts, completions)), longest)
    trained = replace(trained, strata=tuple(Counter(sources).values()))

    decoded = of_all_sources(sources)[: settings.decoded_prompts]
    chosen, alone = [prompts[i] for i in decoded], [completions[i] for i in decoded]
    with tempfile.TemporaryDirectory(prefix="eagle31-decoded-") as passes:
        served = decode_prompts(
            opened.target,
            *candidate,
            chosen,
            draft_tokens=settings.draft_tokens,
            max_new_tokens=settings.max_new_tokens,
            eos_token_ids=eos_token_ids,
            passes=PassResults(Path(passes)),
        )
    texts = completing.texts(chosen, drafted_completions(served, alone))
    sampling = None
    if settings.temperature > 0:
        sampled = replace(greedy, temperature=settings.temperature)
        completions = completing.complete(prompts, sampled, scratch / "sampled.jsonl")
        rows = packed(completing.samples(prompts, completions))
        strata = Counter(one for one, written in zip(sources, completions, strict=True) if len(written) > 1)
        sampling = sampling_report(*candidate, rows, longest, settings.temperature, tuple(strata.values()))
    return {
        "checkpoint": settings.checkpoint,
        "target": settings.target,
        "k": settings.draft_tokens,
        "max_new_tokens": settings.max_new_tokens,
        "num_prompts": len(prompts),
        "engine": engine_name(opened.dtype, opened.target.device),
        "states": "the states of the same target",
        "aux_layer_ids": list(opened.drafter.config.aux_layer_ids),
        "notes": list(opened.notes),
        "trained": trained.to_json(),
        "untrained": None,
        "sampling": sampling,
        "decoding": decoding_report(served, settings.draft_tokens)
        | agreement_report(*candidate, texts, opened.dtype),
    }


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
    if not 0 <= settings.temperature <= MAX_TEMPERATURE:
        remedy = f"Give 0 (that temperature only), or at most {MAX_TEMPERATURE}."
        raise UserError("--temperature", settings.temperature, remedy)
