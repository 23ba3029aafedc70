"""Decoding in vLLM with the export as drafter."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from data.capture.vllm.environment import find_python
from data.target.spec import TargetSpec
from eagle31.decoding.acceptance import AcceptanceStats
from eagle31.errors import UserError
from train.engines.serving import (
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
from train.evaluation.decoding import DecodedSubset
from train.evaluation.replay import PromptAcceptance

NUM_AT_A_TIME = 8  # prompts that an engine decodes concurrently


@dataclass(frozen=True)
class VllmEvaluation:
    """The export that vLLM evaluates, its target, and how they decode."""

    target: TargetSpec
    target_dtype: torch.dtype
    export: Path
    max_positions: int  # positions that target and drafter both have
    stop_token_ids: tuple[int, ...]
    draft_tokens: int
    max_new_tokens: int
    temperature: float  # of the sampling pass; 0: greedy decoding only
    seed: int
    on_cpu: bool
    engine_args: Mapping[str, Any]  # the recipe's vllm.engine_args
    log: Path  # the file for vLLM's output
    passes: Path  # the directory of finished passes


def decode_in_vllm(
    settings: VllmEvaluation, prompts: Sequence[Sequence[int]], num_decoded: int
) -> DecodedSubset:
    """Decode the first prompts that fit.

    Raises:
        EngineFailure: the engine does not start, fails, or records other drafts than it counts.
        UserError: no prompt fits, or vLLM's environment is missing.
    """
    indices = fitting_prompts(settings, prompts)[:num_decoded]
    log = settings.log
    print(f"evaluate: vLLM decodes {len(indices)} prompts, log: {log}", flush=True)
    job = evaluation_job(settings, [prompts[index] for index in indices])
    [result] = run_jobs([job], find_python(), log)
    drafted = require(result, log)
    for one in drafted.passes:
        check_recorded(one, settings.draft_tokens)
    return DecodedSubset(
        engine=engine_name(job.engine, drafted.vllm_version, "cpu" if settings.on_cpu else "cuda"),
        indices=indices,
        served=drafted.passes[0].served,
        sampling=sampled_report(drafted.passes[1], settings) if len(drafted.passes) > 1 else None,
        dtype=engine_dtype(settings, job.engine),
    )


def fitting_prompts(settings: VllmEvaluation, prompts: Sequence[Sequence[int]]) -> list[int]:
    """Return the indices of prompts that leave room for a completion and the drafts after it.

    Prompts that do not are reported.

    Raises:
        UserError: there are none.
    """
    room = settings.max_positions - settings.max_new_tokens - draft_room(settings.draft_tokens)
    fitting = [index for index, prompt in enumerate(prompts) if len(prompt) <= room]
    if not fitting:
        remedy = (
            f"No held-out prompt and its answer fit the {settings.max_positions} positions of target and "
            "drafter."
        )
        raise UserError("evaluate.max_new_tokens", settings.max_new_tokens, remedy)
    if len(fitting) < len(prompts):
        left_out = len(prompts) - len(fitting)
        print(f"evaluate: {left_out} prompts of more than {room} tokens are left out", flush=True)
    return fitting


def evaluation_job(settings: VllmEvaluation, prompts: Sequence[Sequence[int]]) -> DecodeJob:
    """Return a job that decodes greedily, and samples if that is measured; `engine_args` take precedence."""
    sampled = []
    if settings.temperature and settings.on_cpu:
        print("evaluate: no sampling: vLLM 0.32 ignores temperatures on the CPU when it has a drafter")
    elif settings.temperature:
        sampled.append(Sampling(settings.temperature, settings.seed))
    longest = max(map(len, prompts)) + settings.max_new_tokens
    engine = EngineSpec(
        target=settings.target.checkpoint.path,
        export=settings.export.absolute(),
        k=settings.draft_tokens,
        dtype=str(settings.target_dtype).removeprefix("torch."),
        revision=settings.target.revision,
        trust_remote_code=settings.target.trust_remote_code,
        max_model_len=longest + draft_room(settings.draft_tokens),
        max_num_seqs=NUM_AT_A_TIME,
        enforce_eager=settings.on_cpu,
        seed=settings.seed,
        extra=dict(settings.engine_args),
    )
    return DecodeJob(
        "the export as drafter",
        engine,
        prompts,
        settings.max_new_tokens,
        settings.stop_token_ids,
        [GREEDY, *sampled],
        keep=settings.passes.absolute() / "vllm",
    )


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


def engine_dtype(settings: VllmEvaluation, engine: EngineSpec) -> torch.dtype:
    """Return the dtype in which an engine computes; "auto" stands for the target's."""
    named = getattr(torch, str(engine.arguments()["dtype"]), None)
    return named if isinstance(named, torch.dtype) else settings.target_dtype


def engine_name(engine: EngineSpec, version: str, device: str) -> str:
    """Return the engine as it is named next to its numbers."""
    arguments = engine.arguments()
    return f"vLLM {version}, {arguments['dtype']}, {device}, {arguments['max_num_seqs']} at a time"


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


def sampled_report(drafted: DecodedPass, settings: VllmEvaluation) -> dict[str, Any]:
    """Return what sampling in vLLM gave, whose drafts are greedy."""
    served, k = drafted.served, settings.draft_tokens
    stats = [
        (acceptance(k, [drafts], [completion]),)
        for drafts, completion in zip(served.drafts, served.completions, strict=True)
    ]
    return {
        "temperature": settings.temperature,
        "num_prompts": len(stats),
        "source": "decoding",
        "greedy_drafts": PromptAcceptance(tuple(stats)).to_json(),
        "sampled_drafts": None,
    }
