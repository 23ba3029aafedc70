"""Evaluation of any drafter checkpoint by speculative decoding on given prompts, for `scripts/evaluate`."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedTokenizerBase

from data.target.aux_layers import check_aux_layer_ids
from data.target.cached_decoding import TargetDecoder
from data.target.loading import load_target
from data.target.modules import locate
from data.target.parts import load_target_parts
from data.target.spec import TargetSpec
from data.target.tokenizer import load_tokenizer
from data.text.inspection import parse_template_kwargs
from data.text.sources import read_conversations
from data.text.split import choose_prompts
from data.text.template import render_prompt
from eagle31.errors import UserError
from eagle31.json_files import write_json
from eagle31.model.frozen import FrozenParts
from train.drafter.published import fetch_checkpoint, open_published
from train.evaluation.decoding import decode_without_drafter, greedy_report, sampling_report


@dataclass(frozen=True)
class CheckpointEvaluation:
    """The settings of `scripts/evaluate`."""

    checkpoint: str
    target: str
    data: str
    num_prompts: int = 32
    draft_tokens: int = 4
    max_new_tokens: int = 256
    temperature: float = 0.0  # above 0: decode by sampling as well
    aux_layer_ids: list[int] | None = None
    json: Path | None = None
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


def evaluate_checkpoint(settings: CheckpointEvaluation) -> dict[str, Any]:
    """Decode the prompts with and without the drafter; write the results to `settings.json` if it is set.

    Raises:
        UserError: the input is invalid; raised before the target is loaded.
    """
    check(settings)
    if not sys.stderr.isatty():
        transformers.utils.logging.disable_progress_bar()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    parts = load_target_parts(settings.spec)
    ids = settings.aux_layer_ids and check_aux_layer_ids(settings.aux_layer_ids, parts.num_layers)
    directory = fetch_checkpoint(settings.checkpoint, settings.revision, "checkpoint")
    loaded = open_published(directory, parts, ids, "checkpoint")
    tokenizer = load_tokenizer(settings.spec, settings.chat_template)
    prompts = read_prompts(settings, tokenizer)
    eos = set(parts.eos_token_ids) | {tokenizer.eos_token_id} - {None}
    model = load_target(settings.spec, device)
    config = loaded.drafter.config
    target = TargetDecoder(model, locate(model, settings.spec), config.aux_layer_ids)
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
    limits: dict[str, Any] = {"max_new_tokens": settings.max_new_tokens, "eos_token_ids": tuple(sorted(eos))}
    chain: dict[str, Any] = {"draft_tokens": settings.draft_tokens, **limits}
    plain = decode_without_drafter(target, prompts, device=device, **limits)
    result: dict[str, Any] = {
        "checkpoint": settings.checkpoint,
        "target": settings.target,
        "k": settings.draft_tokens,
        "engine": f"eagle31 (transformers, {str(model.dtype).removeprefix('torch.')}, {device.type})",
        "num_prompts": len(prompts),
        "max_new_tokens": settings.max_new_tokens,
        "aux_layer_ids": list(config.aux_layer_ids),
        "notes": list(loaded.notes),
        "greedy": greedy_report(target, drafter, frozen, prompts, plain, **chain, label="speculative"),
    }
    if settings.json is not None:
        write_json(settings.json, result)  # before sampling, so that nothing is lost if it fails
    if settings.temperature > 0:
        sampling: dict[str, Any] = {
            "temperature": settings.temperature,
            "seed": settings.seed,
            "device": device,
        }
        result["sampling"] = sampling_report(target, drafter, frozen, prompts, **chain, **sampling)
        if settings.json is not None:
            write_json(settings.json, result)
    return result


def check(settings: CheckpointEvaluation) -> None:
    """Raise UserError for settings outside their range."""
    for name in ("num_prompts", "draft_tokens", "max_new_tokens"):
        if getattr(settings, name) < 1:
            raise UserError(f"--{name.replace('_', '-')}", getattr(settings, name), "Give at least 1.")
    if settings.temperature < 0:
        raise UserError("--temperature", settings.temperature, "Give 0 (greedy only) or more.")


def read_prompts(settings: CheckpointEvaluation, tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Return conversations with different first messages, as token ids up to the last assistant turn."""
    read = read_conversations(
        settings.data,
        split=settings.split,
        subset=settings.subset,
        prompt_column=settings.prompt_column,
        response_column=settings.response_column,
        require_answer=False,
        field="--data",
    )
    template_kwargs = parse_template_kwargs(settings.template_kwargs)
    prompts = []
    for conversation in choose_prompts(read.conversations, settings.num_prompts, settings.seed):
        messages = list(conversation.messages)
        while messages and messages[-1]["role"] == "assistant":
            messages.pop()
        prompts.append(list(render_prompt(tokenizer, messages, conversation.tools, template_kwargs)))
    if not prompts:
        raise UserError("--data", settings.data, "It has no prompts.")
    return prompts
