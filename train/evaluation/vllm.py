"""Decoding in vLLM with the export as drafter."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from data.capture.vllm.environment import find_python
from eagle31.decoding.acceptance import AcceptanceStats
from eagle31.errors import UserError
from train.config.run import Stage
from train.context import RunContext
from train.evaluation.measure import Conditions, DecodedSubset, common_positions
from train.evaluation.replay import PromptAcceptance
from train.evaluation.serving import (
    GREEDY,
    DecodedPass,
    DecodeJob,
    EngineFailure,
    EngineSpec,
    Sampling,
    acceptance,
    draft_room,
    require,
    run_jobs,
)

NUM_AT_A_TIME = 8  # prompts that an engine decodes concurrently


def decode_in_vllm(
    context: RunContext, prompts: Sequence[Sequence[int]], conditions: Conditions, passes: Path
) -> DecodedSubset:
    """Decode the first prompts that fit with the run's export; sample, if that is measured.

    Args:
        passes: the directory of finished passes.

    Raises:
        EngineFailure: the engine does not start, fails, or records other drafts than it counts.
        UserError: no prompt fits, or vLLM's environment is missing.
    """
    parts = context.target.parts
    on_cpu, log = context.world.device.type == "cpu", context.output_dir / "vllm-evaluate.log"
    positions = common_positions(parts, context.drafter.config())
    indices = fitting_prompts(prompts, positions, conditions)[: context.config.evaluate.decoded_prompts]
    chosen = [prompts[index] for index in indices]
    sampled = []
    if conditions.temperature and on_cpu:
        print("evaluate: no sampling: vLLM 0.32 ignores temperatures on the CPU when it has a drafter")
    elif conditions.temperature:
        sampled.append(Sampling(conditions.temperature, conditions.seed))
    export = (context.artifacts[Stage.export].directory / "checkpoint").absolute()
    engine = engine_spec(context, chosen, conditions, export=export)
    job = DecodeJob(
        "the export as drafter",
        engine,
        chosen,
        conditions.max_new_tokens,
        conditions.eos_token_ids,
        [GREEDY, *sampled],
        keep=passes.absolute() / "vllm",
    )
    print(f"evaluate: vLLM decodes {len(indices)} prompts, log: {log}", flush=True)
    [result] = run_jobs([job], find_python(), log)
    drafted = require(result, log)
    for one in drafted.passes:
        check_recorded(one, conditions.draft_tokens)
    arguments = engine.arguments()
    dtype = getattr(torch, str(arguments["dtype"]), None)  # "auto" stands for the target's
    device = "cpu" if on_cpu else "cuda"
    return DecodedSubset(
        engine=f"vLLM {drafted.vllm_version}, {arguments['dtype']}, {device}, "
        f"{arguments['max_num_seqs']} at a time",
        indices=indices,
        served=drafted.passes[0].served,
        sampling=sampled_report(drafted.passes[1], conditions) if sampled else None,
        dtype=dtype if isinstance(dtype, torch.dtype) else parts.dtype,
    )


def decode_with_mtp_head(
    context: RunContext, prompts: Sequence[Sequence[int]], conditions: Conditions, passes: Path
) -> dict[str, Any]:
    """Return `mtp` of evaluation.json: what is accepted of greedy drafts by the target's own MTP head.

    It is the baseline of a drafter, and not a part of the run: where vLLM cannot draft with the head, the
    result has the reason, as `missing`.

    Args:
        prompts: all that are replayed; those that fit are decoded.
        passes: the directory of finished passes.
    """
    log = context.output_dir / "vllm-mtp.log"
    positions = common_positions(context.target.parts, context.drafter.config())
    chosen = [prompts[index] for index in fitting_prompts(prompts, positions, conditions)]
    job = DecodeJob(
        "the target's own MTP head",
        engine_spec(context, chosen, conditions, mtp=True),
        chosen,
        conditions.max_new_tokens,
        conditions.eos_token_ids,
        keep=passes.absolute() / "mtp",
    )
    print(f"evaluate: {job.name} drafts for {len(chosen)} prompts in vLLM, log: {log}", flush=True)
    try:
        [result] = run_jobs([job], find_python(), log)
        [drafted] = require(result, log).passes
        check_recorded(drafted, conditions.draft_tokens)
    except EngineFailure as error:
        reason = " ".join(str(error).partition("\n  | ")[0].split())
        return {"missing": f"not measured: {reason}"}
    return accepted_by_prompt(drafted, conditions.draft_tokens).to_json()


def engine_spec(
    context: RunContext, prompts: Sequence[Sequence[int]], conditions: Conditions, **drafter: Any
) -> EngineSpec:
    """Return the engine that decodes these prompts. drafter: `export` or `mtp` of `EngineSpec`."""
    spec, k = context.target.spec, conditions.draft_tokens
    return EngineSpec(
        target=spec.checkpoint.path,
        k=k,
        dtype=str(context.target.parts.dtype).removeprefix("torch."),
        revision=spec.revision,
        trust_remote_code=spec.trust_remote_code,
        max_model_len=max(map(len, prompts)) + conditions.max_new_tokens + draft_room(k),
        max_num_seqs=NUM_AT_A_TIME,
        enforce_eager=context.world.device.type == "cpu",
        seed=conditions.seed,
        extra=single_replica(context.config.vllm.engine_args),
        **drafter,
    )


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


def check_recorded(drafted: DecodedPass, k: int) -> None:
    """Raise EngineFailure if the recorded drafts and their accepted tokens are not those that vLLM counts.

    vLLM counts all of them, also past the end of a completion.
    """
    accepted = [draft.num_accepted for drafts in drafted.served.drafts for draft in drafts]
    recorded, counters = AcceptanceStats.from_lengths(k, accepted), drafted.counters
    if (recorded.num_drafts, recorded.accepted_per_position) != (
        counters.num_drafts,
        counters.accepted_per_position,
    ):
        raise EngineFailure(f"The recorded drafts ({recorded}) are not those that vLLM counts ({counters}).")


def sampled_report(drafted: DecodedPass, conditions: Conditions) -> dict[str, Any]:
    """Return what sampling in vLLM gave, whose drafts are greedy."""
    accepted = accepted_by_prompt(drafted, conditions.draft_tokens)
    return {
        "temperature": conditions.temperature,
        "num_prompts": len(accepted.by_prompt),
        "source": "decoding",
        "greedy_drafts": accepted.to_json(),
        "sampled_drafts": None,
    }


def accepted_by_prompt(drafted: DecodedPass, k: int) -> PromptAcceptance:
    """Return the statistics of each prompt's drafts of k tokens that are within its completion."""
    served = drafted.served
    pairs = zip(served.drafts, served.completions, strict=True)
    return PromptAcceptance(tuple((acceptance(k, [drafts], [completion]),) for drafts, completion in pairs))
