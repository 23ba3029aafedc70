"""The answers stage: the target answers the held-out prompts. Rank 0 runs it."""

from pathlib import Path
from typing import Any

from data.sampling import Sampling
from eagle31.errors import UserError
from train.config.run import Stage
from train.context import RunContext
from train.engines.inputs import completion_inputs
from train.stages.data import HELD_OUT, HELD_OUT_INPUTS
from train.stages.writing import answer_held_out, open_generator


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
            name: answer_held_out(generator, sampling, target, prompts[name], directory / name)
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
