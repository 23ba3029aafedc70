"""The data stage: reads conversations, holds prompts out and tokenizes, on rank 0.

The first process of each other node has its part of the answers written.
"""

import os
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
import torch
from datasets import Dataset, load_from_disk

from data.capture.tokens import token_batches, tokens_fingerprint
from data.conversations.mixing import mix, mixed_training, remove_tables
from data.conversations.perturbation import template_source
from data.conversations.preformatted import SplitText, text_splitter
from data.conversations.prompts import prompt_messages, render_prompt
from data.conversations.schemas import Conversation, Conversations
from data.conversations.table import AugmentedConversations, Selection
from data.conversations.template import TemplateRefused
from data.conversations.tokenize import Enough, check_refused, print_refused, save_dataset, tokenize
from data.conversations.trial import try_rendering
from data.target.tokenizer import check_ids, tokenizer_fingerprint
from eagle31.errors import UserError
from eagle31.json_files import write_json
from eagle31.tensor_files import save_tensors
from train.config.data import SELF, DataConfig
from train.config.run import RunConfig
from train.context import RunContext
from train.distributed import wait_for_ranks
from train.stages.sources import (
    Located,
    evaluation_source,
    mixture_of,
    share_inputs,
    source_inputs,
    training_sources,
)
from train.stages.writing import (
    answer_held_out,
    answer_sampling,
    open_generator,
    regenerated,
    self_inputs,
    write_prompts,
    written_inputs,
)
from train.target import Target

HELD_OUT = ("validation", "test")
SAMPLED = "sampled"  # the test prompts with answers that were sampled as those of the training data
TOKEN_COUNTS = "token_counts.safetensors"  # of the assistant's tokens, by id
SELF_PROMPTS = "self_prompts.jsonl"
ANSWERS, _TOKENIZED = "regenerated", "tokenized"
# Names in `data_inputs` of what the held-out prompts depend on.
HELD_OUT_INPUTS = {"train", "eval", "columns", "tokenizer", "template", "eos_token_ids", "held_out", "seed"}
# Conversations that are tokenized whatever data.max_samples is: the draft vocabulary counts their tokens.
COUNTED_CONVERSATIONS = 20_000
_FEW_CONVERSATIONS = 1_000  # need no process for each core
# With which data.template_probability renders training conversations: those of the ablation in docs/study.md.
OTHER_TEMPLATES = ("renamed_roles", "extra_whitespace", "plain")


def data_inputs(context: RunContext) -> dict[str, Any]:
    """Return what the tokenized data depends on."""
    data = context.config.data
    evaluation = evaluation_source(data, context.target.located)
    inputs: dict[str, Any] = {
        "train": source_inputs(context.config, context.target.located, self_inputs(context)),
        "eval": evaluation and evaluation.fingerprint(),
        "columns": [data.prompt_column, data.response_column],
        "tokenizer": tokenizer_fingerprint(context.target.tokenizer),
        "template": context.target.template_fingerprint,
        "eos_token_ids": context.target.eos_token_ids,
        "held_out": [data.num_validation, data.num_test, _prompt_room(context.config)],
        "seed": context.config.seed,
    }
    assert inputs.keys() == HELD_OUT_INPUTS
    inputs |= {
        "turns": data.turns.value,
        "max_tokens": data.max_tokens,
        "max_samples": context.config.data.max_samples,
    }
    inputs |= share_inputs(data)
    if data.template_probability:
        inputs["templates"] = [data.template_probability, *map(template_source, OTHER_TEMPLATES)]
    if data.regenerate.enabled:
        settings = asdict(data.regenerate)
        del settings["batch_size"]
        settings["held_out_tokens"] = context.config.evaluate.max_new_tokens
        inputs["regenerate"] = settings | written_inputs(context)
    return inputs


def run_data(context: RunContext, directory: Path) -> dict[str, Any]:
    """Read, hold prompts out, render and tokenize, into `train/`, token counts and `held_out.json`.

    Where the target samples the training answers, it answers the test prompts so too, into `sampled/`.
    """
    data = context.config.data
    if not context.world.is_main:
        answer_part(context, directory)
        return {}
    if data.train == SELF and not (directory / SELF_PROMPTS).exists():
        write_prompts(context, directory / SELF_PROMPTS)

    def located(source: str, evaluation: bool) -> str:
        own = source == SELF
        return str(directory / SELF_PROMPTS) if own else context.target.located(source, evaluation)

    target = context.target
    split_text = text_splitter(target.tokenizer, target.template_kwargs, target.eos_token_ids)
    _try_rendering(data, target, located, split_text)
    num_workers = len(os.sched_getaffinity(0))
    read = mix(mixture_of(context.config, located, split_text), directory, num_workers)
    conversations, summary = read.training, read.summary
    prompts = _held_out_prompts(context.config, context.target, read.held_out)
    write_json(directory / "held_out.json", prompts)
    summary |= {f"num_{name}": len(prompts[name]) for name in HELD_OUT}
    limit = context.config.data.max_samples
    if data.template_probability:
        _check_templates(data, context.target, conversations[0])
    if data.regenerate.enabled:
        wait_for_ranks(context.world)  # which read the conversations from now on
        with open_generator(context, everywhere=False) as generator:
            asked = _asked(context.config, conversations)
            dataset = regenerated(context, generator, asked, directory / ANSWERS)
            assert dataset is not None
            save_dataset(dataset, directory / _TOKENIZED)
            if (sampling := answer_sampling(context)).temperature:
                sampling = replace(sampling, max_new_tokens=context.config.evaluate.max_new_tokens)
                answer_held_out(generator, sampling, context.target, prompts["test"], directory / SAMPLED)
        for path in (directory / ANSWERS).glob("*.arrow"):  # the answers stay, which cost more
            path.unlink()
    else:
        enough = None
        if limit is not None and len(conversations) > max(limit, COUNTED_CONVERSATIONS):
            # As many conversations as samples, where one has several: samples of all kinds are chosen later.
            enough = Enough(max(limit, COUNTED_CONVERSATIONS), num_samples=limit)
            conversations = conversations.shuffled(context.config.seed)
        report = tokenize(
            _augmented(data, context.config.seed, conversations),
            context.target.tokenizer,
            turns=data.turns,
            template_kwargs=context.target.template_kwargs,
            max_tokens=data.max_tokens,
            num_workers=num_workers if len(conversations) >= _FEW_CONVERSATIONS else min(2, num_workers),
            output_dir=directory / _TOKENIZED,
            eos_token_ids=context.target.eos_token_ids,
            vocab_size=context.target.parts.vocab_size,
            enough=enough,
            progress=True,
        )
        summary |= asdict(report)
    remove_tables(directory)
    _choose(directory, limit, context.config.seed, context.target.parts.vocab_size)
    chosen = load_from_disk(str(directory / "train"))
    summary |= _sizes(chosen)  # of the samples to train on, without those that only the vocabulary counts
    # Later stages compare stores with it, on every rank, without reading the tokens.
    summary["tokens_fingerprint"] = tokens_fingerprint(chosen)
    if not summary["num_samples"]:
        raise UserError("data.train", data.train, "No sample has two assistant tokens in a row to train on.")
    return summary


def answer_part(context: RunContext, directory: Path) -> None:
    """Have this node's part of the answers written, by its first process, once there are conversations."""
    if context.config.data.regenerate.enabled:
        wait_for_ranks(context.world)
        if context.world.leads_node:
            with open_generator(context, everywhere=False) as generator:
                asked = _asked(context.config, mixed_training(directory))
                regenerated(context, generator, asked, directory / ANSWERS)


def _choose(directory: Path, limit: int | None, seed: int, vocab_size: int) -> None:
    """Count the tokens of all samples, for the draft vocabulary, and keep the random ones to train on."""
    dataset = load_from_disk(str(directory / _TOKENIZED))
    counts = np.zeros(vocab_size, dtype=np.int64)
    for _, ids, mask in token_batches(dataset):
        counts += np.bincount(ids[mask], minlength=vocab_size)
    save_tensors({"counts": torch.from_numpy(counts)}, directory / TOKEN_COUNTS)
    if limit is None or limit >= len(dataset):
        shutil.rmtree(directory / "train", ignore_errors=True)
        os.replace(directory / _TOKENIZED, directory / "train")
        return
    save_dataset(dataset.shuffle(seed=seed).select(range(limit)).flatten_indices(), directory / "train")
    shutil.rmtree(directory / _TOKENIZED)


def _try_rendering(data: DataConfig, target: Target, located: Located, split_text: SplitText) -> None:
    """Try the template on the first conversations of each source; reading all of them can take long."""
    notes = {
        try_rendering(
            source.reader(split_text),
            target.tokenizer,
            turns=None if data.regenerate.enabled else data.turns,
            template_kwargs=target.template_kwargs,
            eos_token_ids=target.eos_token_ids,
            vocab_size=target.parts.vocab_size,
        )
        for source in training_sources(data, located).values()
    }
    for note in notes - {None}:
        print(f"data: {note}", flush=True)


def _held_out_prompts(
    config: RunConfig, target: Target, held_out: list[Conversation]
) -> dict[str, list[dict]]:
    """Return token ids up to the turn that the target writes, divided between validation and test."""
    data, room = config.data, _prompt_room(config)
    rendered = []
    refusals: list[tuple[str, str]] = []
    for conversation in held_out:
        messages = prompt_messages(conversation)
        try:
            ids = render_prompt(target.tokenizer, messages, conversation.tools, target.template_kwargs)
        except TemplateRefused as refused:
            refusals.append((conversation.id, refused.remedy))
            continue
        check_ids(target.tokenizer, ids, target.parts.vocab_size)
        if len(ids) <= room:
            said = {"messages": list(conversation.messages), "tools": conversation.tools}
            rendered.append({"id": conversation.id, "input_ids": list(ids), **said})
    print_refused(refusals)
    if not rendered:
        check_refused(refusals, len(held_out))
    num_validation = round(len(rendered) * data.num_validation / (data.num_validation + data.num_test))
    if len(rendered) > 1 and not 0 < num_validation < len(rendered):
        remedy = (
            f"There are {len(rendered)} held-out prompts for it and data.num_test={data.num_test}, and one "
            "of the two would have none; choose them in another proportion, or give more prompts."
        )
        raise UserError("data.num_validation", data.num_validation, remedy)
    if len(rendered) < 2:
        raise UserError(
            "train.row_tokens",
            config.train.row_tokens,
            f"Only {len(rendered)} of {len(held_out)} held-out prompts leave room for "
            f"evaluate.max_new_tokens ({config.evaluate.max_new_tokens}) tokens; raise this value or "
            "lower that one.",
        )
    return {"validation": rendered[:num_validation], "test": rendered[num_validation:]}


def _prompt_room(config: RunConfig) -> int:
    return config.train.row_tokens - config.evaluate.max_new_tokens


def _asked(config: RunConfig, conversations: Selection) -> Conversations:
    """Return what the target answers: all conversations, in the order from which `data.max_samples` takes."""
    shuffled = config.data.max_samples is not None
    some = conversations.shuffled(config.seed) if shuffled else conversations
    return _augmented(config.data, config.seed, some)


def _augmented(data: DataConfig, seed: int, conversations: Conversations) -> Conversations:
    if not data.template_probability:
        return conversations
    return AugmentedConversations(conversations, data.template_probability, OTHER_TEMPLATES, seed)


def _check_templates(data: DataConfig, target: Target, example: Conversation) -> None:
    """Try the templates on one conversation, before all of them are tokenized.

    Raises:
        UserError: a template raises.
    """
    prompt = prompt_messages(example)
    for name in OTHER_TEMPLATES:
        try:
            render_prompt(target.tokenizer, prompt, example.tools, target.template_kwargs, name)
        except TemplateRefused as refused:
            remedy = f"Set it to 0: the template {name} cannot be used. {refused.remedy}"
            raise UserError("data.template_probability", data.template_probability, remedy) from None


def _sizes(dataset: Dataset) -> dict[str, int]:
    """Return the counts that `TokenizeReport` has for tokenized data."""
    num_tokens = num_supervised_tokens = 0
    for batch in dataset.with_format("arrow", columns=["loss_mask"]).iter(1000):
        num_tokens += pc.sum(pc.list_value_length(batch["loss_mask"])).as_py() or 0
        num_supervised_tokens += pc.sum(pc.list_flatten(batch["loss_mask"])).as_py() or 0
    return {
        "num_samples": len(dataset),
        "num_tokens": num_tokens,
        "num_supervised_tokens": num_supervised_tokens,
    }
