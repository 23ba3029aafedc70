"""What `scripts/evaluate` does: any drafter's acceptance, by real speculative decoding on given prompts."""

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
    """The command line of `scripts/evaluate`."""

    checkpoint: str
    target: str
    data: str
    num_prompts: int = 32
    draft_tokens: int = 4
    max_new_tokens: int = 256
    temperature: float = 0.0  # above 0, also by sampling
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


def evaluate_checkpoint(asked: CheckpointEvaluation) -> dict[str, Any]:
    """Loads, decodes, and writes `asked.json` if it is given.

    Raises:
        UserError: bad input; before the target is loaded.
    """
    check(asked)
    if not sys.stderr.isatty():
        transformers.utils.logging.disable_progress_bar()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    parts = load_target_parts(asked.spec)
    ids = asked.aux_layer_ids and check_aux_layer_ids(asked.aux_layer_ids, parts.num_layers)
    directory = fetch_checkpoint(asked.checkpoint, asked.revision, "checkpoint")
    loaded = open_published(directory, parts, ids, "checkpoint")
    tokenizer = load_tokenizer(asked.spec, asked.chat_template)
    prompts = read_prompts(asked, tokenizer)
    eos = set(parts.eos_token_ids) | {tokenizer.eos_token_id} - {None}
    model = load_target(asked.spec, device)
    config = loaded.drafter.config
    target = TargetDecoder(model, locate(model, asked.spec), config.aux_layer_ids)
    # On a CPU bf16 is emulated; elsewhere the drafter drafts in the target's dtype, as it is served.
    dtype = torch.float32 if device.type == "cpu" else model.dtype
    drafter = loaded.drafter.to(device, dtype)
    draft_ids = loaded.draft_target_ids
    frozen = FrozenParts(
        loaded.embed_tokens.to(device, dtype),
        parts.head.to(device),
        None if draft_ids is None else draft_ids.to(device),
        lm_head=None,
    )
    limits: dict[str, Any] = {"max_new_tokens": asked.max_new_tokens, "eos_token_ids": tuple(sorted(eos))}
    chain: dict[str, Any] = {"draft_tokens": asked.draft_tokens, **limits}
    plain = decode_without_drafter(target, prompts, device=device, **limits)
    result: dict[str, Any] = {
        "checkpoint": asked.checkpoint,
        "target": asked.target,
        "k": asked.draft_tokens,
        "engine": f"eagle31 (transformers, {str(model.dtype).removeprefix('torch.')}, {device.type})",
        "num_prompts": len(prompts),
        "max_new_tokens": asked.max_new_tokens,
        "aux_layer_ids": list(config.aux_layer_ids),
        "notes": list(loaded.notes),
        "greedy": greedy_report(target, drafter, frozen, prompts, plain, **chain, label="speculative"),
    }
    if asked.temperature > 0:
        sampling: dict[str, Any] = {"temperature": asked.temperature, "seed": asked.seed, "device": device}
        result["sampling"] = sampling_report(target, drafter, frozen, prompts, **chain, **sampling)
    if asked.json is not None:
        write_json(asked.json, result)
    return result


def check(asked: CheckpointEvaluation) -> None:
    """Refuses what no measurement could use."""
    for name in ("num_prompts", "draft_tokens", "max_new_tokens"):
        if getattr(asked, name) < 1:
            raise UserError(f"--{name.replace('_', '-')}", getattr(asked, name), "Give at least 1.")
    if asked.temperature < 0:
        raise UserError("--temperature", asked.temperature, "Give 0 for greedy decoding alone, or more.")


def read_prompts(asked: CheckpointEvaluation, tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Token ids up to the last assistant turn, of conversations with different first messages."""
    read = read_conversations(
        asked.data,
        split=asked.split,
        subset=asked.subset,
        prompt_column=asked.prompt_column,
        response_column=asked.response_column,
        require_answer=False,
        field="--data",
    )
    template_kwargs = parse_template_kwargs(asked.template_kwargs)
    prompts = []
    for conversation in choose_prompts(read.conversations, asked.num_prompts, asked.seed):
        messages = list(conversation.messages)
        while messages and messages[-1]["role"] == "assistant":
            messages.pop()
        prompts.append(list(render_prompt(tokenizer, messages, conversation.tools, template_kwargs)))
    if not prompts:
        raise UserError("--data", asked.data, "It holds no prompts.")
    return prompts
