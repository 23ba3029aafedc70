"""Decoding in vLLM with the export as drafter."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from data.capture.vllm.environment import find_python
from eagle31.errors import UserError
from train.config.run import Stage
from train.context import RunContext
from train.evaluation.measure import Conditions, DecodedSubset, common_positions
from train.evaluation.replay import PromptAcceptance
from train.evaluation.serving import (
    DecodeJob,
    EngineFailure,
    EngineSpec,
    JobResult,
    draft_room,
    run_job,
)

NUM_AT_A_TIME = 8  # prompts that an engine decodes concurrently


def decode_in_vllm(
    context: RunContext, prompts: Sequence[Sequence[int]], conditions: Conditions
) -> DecodedSubset:
    """Decode the first prompts that fit with the run's export.

    Raises:
        EngineFailure: the engine does not start, fails, or records other drafts than it counts.
        UserError: no prompt fits, or vLLM's environment is missing.
    """
    parts = context.target.parts
    positions = common_positions(parts, context.drafter.config())
    indices = fitting_prompts(prompts, positions, conditions)[: context.config.evaluate.decoded_prompts]
    export = (context.artifacts[Stage.export].directory / "checkpoint").absolute()
    job = decode_job(
        "the export as drafter", context, [prompts[one] for one in indices], conditions, export=export
    )
    drafted = _run(job, context.output_dir / "vllm-evaluate.log")
    arguments = job.engine.arguments()
    dtype = getattr(torch, str(arguments["dtype"]), None)  # "auto" stands for the target's
    return DecodedSubset(
        engine=f"vLLM {drafted.vllm_version}, {arguments['dtype']}, {context.world.device.type}, "
        f"{arguments['max_num_seqs']} at a time",
        indices=indices,
        served=drafted.served,
        dtype=dtype if isinstance(dtype, torch.dtype) else parts.dtype,
    )


def decode_with_mtp_head(
    context: RunContext, prompts: Sequence[Sequence[int]], conditions: Conditions
) -> dict[str, Any]:
    """Return `mtp` of evaluation.json: what is accepted of greedy drafts by the target's own MTP head.

    It is the baseline of a drafter, and not a part of the run: where vLLM cannot draft with the head, the
    result has the reason, as `missing`.

    Args:
        prompts: all that are replayed; those that fit are decoded.
    """
    positions = common_positions(context.target.parts, context.drafter.config())
    chosen = [prompts[index] for index in fitting_prompts(prompts, positions, conditions)]
    job = decode_job("the target's own MTP head", context, chosen, conditions, mtp=True)
    try:
        served = _run(job, context.output_dir / "vllm-mtp.log").served
    except EngineFailure as error:
        reason = " ".join(str(error).partition("\n  | ")[0].split())
        return {"missing": f"not measured: {reason}"}
    return PromptAcceptance(tuple((one,) for one in served.acceptance(conditions.draft_tokens))).to_json()


def _run(job: DecodeJob, log: Path) -> JobResult:
    print(f"evaluate: vLLM decodes {len(job.prompts)} prompts with {job.name}, log: {log}", flush=True)
    return run_job(job, find_python(), log)


def decode_job(
    name: str, context: RunContext, prompts: Sequence[Sequence[int]], conditions: Conditions, **drafter: Any
) -> DecodeJob:
    """Return the job that decodes these prompts. drafter: `export` or `mtp` of `EngineSpec`."""
    k, target = conditions.draft_tokens, context.target
    engine = EngineSpec(
        target=replace(target.spec, dtype=target.parts.dtype_name),
        k=k,
        max_model_len=max(map(len, prompts)) + conditions.max_new_tokens + draft_room(k),
        max_num_seqs=NUM_AT_A_TIME,
        enforce_eager=context.world.device.type == "cpu",
        extra=single_replica(context.config.vllm.engine_args),
        **drafter,
    )
    return DecodeJob(name, engine, prompts, conditions.max_new_tokens, conditions.eos_token_ids)


def fitting_prompts(prompts: Sequence[Sequence[int]], positions: int, conditions: Conditions) -> list[int]:
    """Return the indices of prompts that leave room for a completion and the drafts after it.

    Prompts that do not are reported.

    Args:
        positions: that target and drafter both have.

    Raises:
        UserError: there are none.
    """
    room = positions - conditions.max_new_tokens - draft_room(conditions.draft_tokens)
    fitting = [index for index, prompt in enumerate(prompts) if len(prompt) <= room]
    if not fitting:
        remedy = f"No held-out prompt and its answer fit the {positions} positions of target and drafter."
        raise UserError("evaluate.max_new_tokens", conditions.max_new_tokens, remedy)
    if len(fitting) < len(prompts):
        left_out = len(prompts) - len(fitting)
        print(f"evaluate: {left_out} prompts of more than {room} tokens are left out", flush=True)
    return fitting


def single_replica(engine_args: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a server's engine for `vllm.LLM`, which has no data parallelism.

    The replicas of a dense target are copies, and one of them is enough. With expert parallelism the experts
    are divided over all of them, so that tensor parallelism takes as many GPUs.
    """
    kept = {name: value for name, value in engine_args.items() if not name.startswith("data_parallel")}
    if engine_args.get("enable_expert_parallel"):
        num_gpus = engine_args.get("tensor_parallel_size", 1) * engine_args.get("data_parallel_size", 1)
        kept["tensor_parallel_size"] = num_gpus
    return kept
