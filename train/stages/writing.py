"""What the target writes for a run: its own prompts, and the answers to training and held-out prompts."""

from contextlib import AbstractContextManager, closing
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
from datasets import Dataset

from data.capture.vllm.client import check_target
from data.conversations.schemas import Conversations
from data.conversations.tokenize import record_batch, save_dataset
from data.generation.answers import MIN_ANSWER_TOKENS, AnswerGenerator, answer_prompts, joined
from data.generation.hf import transformers_generator
from data.generation.regenerate import regenerate
from data.generation.self_prompts import UserTurn, user_turn, write_self_prompts
from data.generation.vllm import VllmGenerator
from data.sampling import Sampling
from data.target.tokenizer import check_ids
from eagle31.errors import UserError
from train.config.data import SELF
from train.config.target import TargetEngine
from train.context import RunContext
from train.distributed import wait_for
from train.engines.inputs import completion_inputs
from train.plan.target import longest_prompt
from train.target import Target


def written_inputs(context: RunContext) -> dict[str, Any]:
    """Return what the target's completions depend on apart from prompts and sampling settings."""
    config = context.config
    found = completion_inputs(config.target, context.target.parts, config.vllm.engine_args)
    if config.target.engine is TargetEngine.hf:  # a sampled completion depends on its batch
        found["batch_size"] = config.data.regenerate.batch_size
    return found


def self_inputs(context: RunContext) -> dict[str, Any] | None:
    """Return what the prompts that the target writes depend on; None for a run that reads its prompts."""
    data = context.config.data
    if data.train != SELF:
        return None
    return asdict(data.self_prompts) | asdict(_user_turn(context)) | written_inputs(context)


def _user_turn(context: RunContext) -> UserTurn:
    """Return where the target writes its prompts."""
    data, target = context.config.data, context.target
    system_prompt, eos_token_ids = data.self_prompts.system_prompt, target.eos_token_ids
    turn = user_turn(target.tokenizer, system_prompt, target.template_kwargs, eos_token_ids)
    check_ids(target.tokenizer, [*turn.prompt, *turn.stop_token_ids], target.parts.vocab_size)
    return turn


def write_prompts(context: RunContext, output: Path) -> None:
    """Have the target write the prompts of all conversations."""
    settings, turn = context.config.data.self_prompts, _user_turn(context)
    sampling = Sampling(
        max_new_tokens=settings.max_new_tokens,
        stop_token_ids=turn.stop_token_ids,
        temperature=settings.temperature,
        top_p=settings.top_p,
        seed=context.config.seed,
    )
    with open_generator(context) as generator:
        write_self_prompts(
            generator,
            context.target.tokenizer,
            turn,
            sampling,
            num=settings.num,
            system_prompt=settings.system_prompt,
            output=output,
            model_fingerprint=context.target.parts.fingerprint,
            title="prompts",
            progress=True,
        )


def answer_sampling(context: RunContext) -> Sampling:
    """Return how the target answers the training conversations."""
    settings = context.config.data.regenerate
    given = {} if settings.temperature is None else {"temperature": settings.temperature}
    return Sampling(
        max_new_tokens=settings.max_new_tokens,
        stop_token_ids=context.target.eos_token_ids,
        seed=context.config.seed,
        **(given or context.target.parts.sampling),
    )


def regenerated(
    context: RunContext, generator: AnswerGenerator, conversations: Conversations, directory: Path
) -> Dataset | None:
    """Have this node's blocks of conversations answered; return all samples on rank 0."""
    target, world = context.target, context.world
    return regenerate(
        conversations,
        target.tokenizer,
        generator,
        answer_sampling(context),
        model_fingerprint=target.parts.fingerprint,
        max_tokens=context.config.data.max_tokens,
        template_kwargs=target.template_kwargs,
        directory=directory,
        max_samples=context.config.data.max_samples,
        driver=world.node_rank,
        num_drivers=world.num_nodes,
        wait_for=wait_for,
        progress=world.is_main,
    )


def answer_held_out(
    generator: AnswerGenerator, sampling: Sampling, target: Target, prompts: list[dict], directory: Path
) -> dict[str, int]:
    """Have held-out prompts answered, into `directory` (Arrow); the answers are in a JSONL file next to it.

    Raises:
        UserError: no answer is long enough for a draft.
    """
    token_ids = [prompt["input_ids"] for prompt in prompts]
    completions = answer_prompts(
        generator,
        token_ids,
        sampling,
        output=directory.with_suffix(".jsonl"),
        model_fingerprint=target.parts.fingerprint,
        progress=True,
    )
    samples = [
        (prompt["id"], joined([(prompt["input_ids"], answer)]))
        for prompt, answer in zip(prompts, completions, strict=True)
        if len(answer) >= MIN_ANSWER_TOKENS
    ]
    dataset = Dataset(pa.Table.from_batches([record_batch(samples)]))
    if not len(dataset):
        raise UserError("target.model", target.settings.model, "It completes no held-out prompt.")
    save_dataset(dataset, directory)
    return {"num_prompts": len(dataset), "num_tokens": sum(map(len, completions))}


def open_generator(context: RunContext, everywhere: bool = True) -> AbstractContextManager[AnswerGenerator]:
    """Open the engine that writes the target's completions; what it holds is free at the end.

    Args:
        everywhere: whether this process alone sends to the servers of all nodes. Otherwise the first process
            of each node sends.
    """
    if context.config.target.engine is TargetEngine.hf:
        batch_size = context.config.data.regenerate.batch_size
        return transformers_generator(context.target.spec, context.world.device, batch_size)
    check = partial(check_target, context.captured_target, longest_prompt(context.config))
    clients = context.servers.clients(everywhere, senders=1)
    return closing(VllmGenerator(clients, check, context.servers.patience_seconds))
