"""The evaluate stage: decodes the test prompts with the export. Rank 0 runs it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import load_from_disk

from data.store import HiddenStateStore
from data.target.cached_decoding import TargetDecoder
from eagle31.export.read import load_export
from eagle31.json_files import write_json
from eagle31.model.drafter import Drafter
from eagle31.model.frozen import FrozenParts
from train.config.run import Stage
from train.config.target import TargetEngine
from train.context import RunContext
from train.evaluation.decoding import decode_without_drafter, greedy_report, replay_by_length, sampling_report
from train.evaluation.passes import PassResults
from train.evaluation.vllm import VllmEvaluation, decode_in_vllm, single_replica
from train.stages.building import new_drafter
from train.stages.vocab import load_vocab

Candidate = tuple[Drafter, FrozenParts]


def evaluate_inputs(context: RunContext) -> dict[str, Any]:
    config = context.config
    inputs: dict[str, Any] = {
        "export": context.artifacts[Stage.export].key,
        "answers": context.artifacts[Stage.answers].key,
        "capture": context.artifacts[Stage.capture].key,
        "draft_tokens": config.evaluate.draft_tokens,
        "sampling": config.evaluate.sampling and config.evaluate.temperature,
        "untrained": config.evaluate.untrained,
        "seed": config.seed,
    }
    if config.target.engine is TargetEngine.vllm:
        # vLLM's arguments change its speed, and some change numbers (dtype, quantization).
        inputs |= {"engine": config.target.engine.value, "engine_args": config.vllm.engine_args}
    return inputs


def run_evaluate(context: RunContext, directory: Path) -> dict[str, Any]:
    """Decode the test prompts with the export and replay their completions, into `evaluation.json`.

    Each pass is in `passes/` once it is finished, and is not repeated after an interruption.
    """
    evaluate = context.config.evaluate
    tests = load_from_disk(str(context.artifacts[Stage.answers].directory / "test"))
    prompts = [row["input_ids"][: row["num_prompt_tokens"]] for row in tests]
    store = HiddenStateStore(context.artifacts[Stage.capture].directory / "test")
    store.verify(cache_dir=context.cache_dir, progress=True)
    in_vllm = context.config.target.engine is TargetEngine.vllm
    # Before a drafter is loaded, because vLLM takes nearly all of the GPU's memory.
    passes = directory / "passes"
    decoded = decode_in_vllm(vllm_evaluation(context, passes), prompts) if in_vllm else None
    trained = exported_drafter(context)
    fresh = untrained_drafter(context) if evaluate.untrained else None
    if decoded is None:
        decoded = decode_in_transformers(context, prompts, trained, fresh, PassResults(passes))
    evaluation = {
        "k": evaluate.draft_tokens,
        "max_new_tokens": evaluate.max_new_tokens,
        **decoded,
        **replayed(context, store, trained, fresh),
    }
    write_json(directory / "evaluation.json", evaluation)
    return {"acceptance_length": evaluation["greedy"]["acceptance_length"], "k": evaluate.draft_tokens}


def vllm_evaluation(context: RunContext, passes: Path) -> VllmEvaluation:
    """Return what vLLM needs to decode with this run's export.

    Args:
        passes: the directory of finished passes.
    """
    evaluate, parts = context.config.evaluate, context.parts
    drafter = context.drafter_config(context.shape.draft_vocab_size or parts.vocab_size)
    target_positions = getattr(parts.config.get_text_config(), "max_position_embeddings", None)
    return VllmEvaluation(
        target=context.spec,
        target_dtype=parts.embed_tokens.dtype,
        export=context.artifacts[Stage.export].directory / "checkpoint",
        max_positions=min(
            target_positions or drafter.max_position_embeddings, drafter.max_position_embeddings
        ),
        stop_token_ids=context.eos_token_ids,
        draft_tokens=evaluate.draft_tokens,
        max_new_tokens=evaluate.max_new_tokens,
        temperature=evaluate.temperature if evaluate.sampling else None,
        seed=context.config.seed,
        on_cpu=context.world.device.type == "cpu",
        engine_args=single_replica(context.config.vllm.engine_args),
        log=context.output_dir / "vllm-evaluate.log",
        passes=passes,
    )


def decode_in_transformers(
    context: RunContext,
    prompts: Sequence[Sequence[int]],
    trained: Candidate,
    fresh: Candidate | None,
    passes: PassResults,
) -> dict[str, Any]:
    """Return the decoding part of `evaluation.json`, from eagle31's decoder."""
    evaluate, device = context.config.evaluate, context.world.device
    model, modules = context.load_target()
    target = TargetDecoder(model, modules, context.aux_layer_ids)
    limits: dict[str, Any] = {
        "max_new_tokens": evaluate.max_new_tokens,
        "eos_token_ids": context.eos_token_ids,
    }
    plain = passes.decoded("plain", lambda: decode_without_drafter(target, prompts, device=device, **limits))
    chain: dict[str, Any] = {"draft_tokens": evaluate.draft_tokens, **limits}

    def decode(candidate: Candidate, label: str) -> dict[str, Any]:
        return greedy_report(target, *candidate, prompts, plain, **chain, label=label)

    def sample() -> dict[str, Any]:
        return sampling_report(
            target,
            *trained,
            prompts,
            **chain,
            temperature=evaluate.temperature,
            seed=context.config.seed,
            device=device,
        )

    greedy = passes.run("greedy", lambda: decode(trained, "speculative decoding"))
    untrained = None if fresh is None else passes.run("untrained", lambda: decode(fresh, "untrained"))
    sampling = passes.run("sampling", sample) if evaluate.sampling else None
    return {
        "engine": f"eagle31 (transformers, {str(model.dtype).removeprefix('torch.')}, {device.type})",
        "num_prompts": len(prompts),
        "greedy": greedy,
        "sampling": sampling,
        "untrained": untrained,
    }


def replayed(
    context: RunContext, store: HiddenStateStore, trained: Candidate, fresh: Candidate | None
) -> dict[str, Any]:
    """Return the replay part of `evaluation.json`, which needs no target."""
    draft_tokens, device = context.config.evaluate.draft_tokens, context.world.device
    ours = replay_by_length(*trained, store, draft_tokens, device)
    theirs = fresh and replay_by_length(*fresh, store, draft_tokens, device)
    return {
        "replay": ours[draft_tokens].to_json(),
        "by_draft_length": [
            {
                "k": k,
                "trained": stats.acceptance_length,
                "untrained": theirs and theirs[k].acceptance_length,
            }
            for k, stats in ours.items()
        ],
    }


def exported_drafter(context: RunContext) -> Candidate:
    """Load the export, in float32 on the CPU and in the dtype of training on a GPU."""
    device = context.world.device
    dtype = torch.float32 if device.type == "cpu" else context.dtype
    loaded = load_export(context.artifacts[Stage.export].directory / "checkpoint", device, dtype)
    frozen = FrozenParts(
        loaded.embed_tokens, context.parts.head.to(device), loaded.draft_target_ids, lm_head=None
    )
    return loaded.drafter, frozen


def untrained_drafter(context: RunContext) -> Candidate:
    """Build the drafter as it was before the first step."""
    drafter, frozen = new_drafter(context, load_vocab(context.artifacts[Stage.vocab]))
    drafter = drafter.to(device=context.world.device, dtype=frozen.embed_tokens.dtype)
    return drafter.requires_grad_(False), frozen
