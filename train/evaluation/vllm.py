"""Evaluation in vLLM: the export as its drafter, held against the target alone."""

from collections.abc import Sequence
from typing import Any

from data.vllm.environment import find_python
from eagle31.decoding.acceptance import AcceptanceStats
from eagle31.errors import UserError
from train.config.run import Stage
from train.context import RunContext
from train.evaluation.decoding import decoding_numbers, text_verdicts, verdict
from train.serving.drafts import Served
from train.serving.engine import (
    GREEDY,
    DecodedPass,
    DecodeJob,
    EngineFailure,
    EngineSpec,
    JobResult,
    Sampling,
    draft_room,
    require,
    run_jobs,
)

NUM_AT_A_TIME = 8  # prompts that an engine decodes together
_DRAFTER, _ALONE = "the export as drafter", "the target alone"


def decode_in_vllm(context: RunContext, prompts: Sequence[Sequence[int]]) -> dict[str, Any]:
    """What decoding gives of `evaluation.json`: one engine with the drafter, then one without.

    A drafter that was never trained is not served: `untrained` is None, and replay measures it alone.

    Raises:
        EngineFailure: an engine does not start, fails, or drafts other than it counts.
        UserError: no prompt fits, or vLLM's environment is not there.
    """
    evaluate = context.config.evaluate
    prompts = fitting_prompts(context, prompts)
    log = context.output_dir / "vllm-evaluate.log"
    print(f"evaluate: vLLM decodes {len(prompts)} prompts, log: {log}", flush=True)
    jobs = evaluation_jobs(context, prompts)
    drafted, alone = [require(result, log) for result in run_jobs(jobs, find_python(), log)]
    greedy, *sampled = [
        pass_numbers(ours, own, evaluate.draft_tokens)
        for ours, own in zip(drafted.passes, alone.passes, strict=True)
    ]
    greedy |= text_verdicts(compared_texts(drafted, alone))
    return {
        "engine": engine_name(jobs[0].engine, drafted.vllm_version, context.world.device.type),
        "num_prompts": len(prompts),
        "greedy": greedy,
        "sampling": sampled[0] | {"temperature": evaluate.temperature} if sampled else None,
        "untrained": None,
    }


def fitting_prompts(context: RunContext, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Those that leave room for an answer and the drafts behind it; the others are told.

    Raises:
        UserError: there are none.
    """
    evaluate = context.config.evaluate
    drafter = context.drafter_config(context.shape.draft_vocab_size or context.parts.vocab_size)
    own = getattr(context.parts.config.get_text_config(), "max_position_embeddings", None)
    positions = min(own or drafter.max_position_embeddings, drafter.max_position_embeddings)
    room = positions - evaluate.max_new_tokens - draft_room(evaluate.draft_tokens)
    fitting = [list(prompt) for prompt in prompts if len(prompt) <= room]
    if not fitting:
        remedy = f"No held-out prompt and its answer fit the {positions} positions of target and drafter."
        raise UserError("evaluate.max_new_tokens", evaluate.max_new_tokens, remedy)
    if len(fitting) < len(prompts):
        left_out = len(prompts) - len(fitting)
        print(f"evaluate: {left_out} prompts of more than {room} tokens are left out", flush=True)
    return fitting


def evaluation_jobs(context: RunContext, prompts: Sequence[Sequence[int]]) -> tuple[DecodeJob, DecodeJob]:
    """With the drafter and without, under the same conditions, greedy and sampling in the same engine."""
    evaluate = context.config.evaluate
    passes = [GREEDY]
    if evaluate.sampling and context.world.device.type == "cpu":
        print("evaluate: no sampling: beside a drafter vLLM 0.32 does not read temperatures on the CPU")
    elif evaluate.sampling:
        passes.append(Sampling(evaluate.temperature, context.config.seed))
    shared: dict[str, Any] = {
        "prompts": prompts,
        "max_new_tokens": evaluate.max_new_tokens,
        "stop_token_ids": context.eos_token_ids,
        "passes": passes,
        "warm_up": True,
    }
    return (
        DecodeJob(_DRAFTER, engine_spec(context, prompts, drafter=True), record_drafts=True, **shared),
        DecodeJob(_ALONE, engine_spec(context, prompts, drafter=False), margins_against=_DRAFTER, **shared),
    )


def engine_spec(context: RunContext, prompts: Sequence[Sequence[int]], *, drafter: bool) -> EngineSpec:
    """In float32 on the CPU, else in the target's own dtype; `vllm.engine_args` have the last word."""
    evaluate, on_cpu = context.config.evaluate, context.world.device.type == "cpu"
    export = context.artifacts[Stage.export].directory / "checkpoint"
    own_dtype = str(context.parts.embed_tokens.dtype).removeprefix("torch.")
    longest = max(map(len, prompts)) + evaluate.max_new_tokens
    return EngineSpec(
        target=context.spec.checkpoint.path,
        export=export.absolute() if drafter else None,
        k=evaluate.draft_tokens,
        dtype="float32" if on_cpu else own_dtype,
        revision=context.spec.revision,
        trust_remote_code=context.spec.trust_remote_code,
        max_model_len=longest + draft_room(evaluate.draft_tokens),
        max_num_seqs=NUM_AT_A_TIME,
        enforce_eager=on_cpu,
        seed=context.config.seed,
        # Drafts are recorded without async scheduling: the target alone is timed without it too.
        extra=context.config.vllm.engine_args | {"async_scheduling": False},
    )


def engine_name(engine: EngineSpec, version: str, device: str) -> str:
    """As it stands beside every number."""
    arguments = engine.arguments()
    return f"vLLM {version}, {arguments['dtype']}, {device}, {arguments['max_num_seqs']} at a time"


def pass_numbers(drafted: DecodedPass, alone: DecodedPass, draft_tokens: int) -> dict[str, Any]:
    """Acceptance and speed of one pass.

    Raises:
        EngineFailure: the recorded drafts are not those that vLLM counts.
    """
    served = drafted.served
    accepted = [draft.num_accepted for drafts in served.supervised_drafts for draft in drafts]
    if len(accepted) != drafted.counters.num_drafts:
        counted = drafted.counters.num_drafts
        raise EngineFailure(f"{len(accepted)} drafts were recorded and vLLM counts {counted}.")
    numbers = decoding_numbers(
        AcceptanceStats.from_lengths(draft_tokens, accepted),
        num_tokens=num_tokens(served),
        num_target_forwards=num_target_forwards(served),
        seconds=drafted.seconds,
    )
    speedup = (num_tokens(served) / drafted.seconds) / (num_tokens(alone.served) / alone.seconds)
    return numbers | {"plain_seconds": alone.seconds, "speedup": speedup}


def num_tokens(served: Served) -> int:
    return sum(map(len, served.texts))


def num_target_forwards(served: Served) -> int:
    """The prompt's, one for each draft, and one for each token that no draft led to.

    One that several prompts share counts for each of them, as if they were decoded one by one.
    """
    total = 0
    for text, drafts in zip(served.texts, served.drafts, strict=True):
        drafted = sum(min(draft.num_accepted + 1, len(text) - draft.position) for draft in drafts)
        total += len(drafts) + len(text) - drafted
    return total


def compared_texts(drafted: JobResult, alone: JobResult) -> list[str]:
    """Each greedy text against the target's own."""
    ours, own = (result.passes[0].served.texts for result in (drafted, alone))
    return [verdict(*texts) for texts in zip(ours, own, alone.margins, strict=True)]
