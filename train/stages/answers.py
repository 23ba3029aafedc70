"""The answers stage: the target answers the held-out prompts. Rank 0 runs it."""

from pathlib import Path
from typing import Any

import pyarrow as pa
from datasets import Dataset

from data.conversations.tokenize import save_dataset
from data.generation.answers import MIN_ANSWER_TOKENS, AnswerGenerator, answer_prompts, record_batch
from data.sampling import Sampling
from eagle31.errors import UserError
from train.config.run import Stage
from train.context import RunContext
from train.engines.inputs import completion_inputs
from train.stages.data import HELD_OUT, HELD_OUT_INPUTS
from train.stages.writing import open_generator
from train.target import Target


def answers_inputs(context: RunContext) -> dict[str, Any]:
    config, data = context.config, context.artifacts[Stage.data].inputs
    return {
        # Not all of the data: other training samples need no other answers.
        "data": {name: data[name] for name in sorted(HELD_OUT_INPUTS)},
        "max_new_tokens": config.evaluate.max_new_tokens,
    } | completion_inputs(config.target, context.target.parts, config.vllm.engine_args)


def run_answers(context: RunContext, directory: Path) -> dict[str, Any]:
    """Have the target answer the held-out prompts greedily, into `validation/` and `test/` (Arrow)."""
    config, target = context.config, context.target
    prompts = context.artifacts[Stage.data].read("held_out.json")
    sampling = Sampling(config.evaluate.max_new_tokens, target.eos_token_ids, 0.0, config.seed)
    with open_generator(context) as generator:
        summary = {
            name: _answer_prompts(generator, sampling, target, prompts[name], directory / name)
            for name in HELD_OUT
        }
    for name in HELD_OUT:  # from here on the datasets alone have the answers
        (directory / name).with_suffix(".jsonl").unlink()
    return summary


def check_answers(context: RunContext) -> None:
    """Raise UserError if all held-out completions are too short for a draft, before they are captured."""
    answers, k = context.artifacts[Stage.answers], context.config.evaluate.draft_tokens
    for name in HELD_OUT:
        rows = answers.dataset(name)
        longest = max(len(row["input_ids"]) - row["num_prompt_tokens"] for row in rows)
        if longest <= k:
            remedy = f"The longest of the target's {name} completions has {longest} tokens; give fewer."
            raise UserError("evaluate.draft_tokens", k, remedy)


def _answer_prompts(
    generator: AnswerGenerator, sampling: Sampling, target: Target, prompts: list[dict], directory: Path
) -> dict[str, int]:
    token_ids = [prompt["input_ids"] for prompt in prompts]
    completions = answer_prompts(
        generator,
        token_ids,
        sampling,
        output=directory.with_suffix(".jsonl"),
        model_fingerprint=target.parts.fingerprint,
        progress=True,
    )
    batch = record_batch(
        (prompt["id"], [(prompt["input_ids"], answer)])
        for prompt, answer in zip(prompts, completions, strict=True)
        if len(answer) >= MIN_ANSWER_TOKENS
    )
    dataset = Dataset(pa.Table.from_batches([batch]))
    if not len(dataset):
        raise UserError("target.model", target.settings.model, "It completes no held-out prompt.")
    save_dataset(dataset, directory)
    return {"num_prompts": len(dataset), "num_tokens": sum(map(len, completions))}
