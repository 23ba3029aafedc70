"""The evaluate stage: acceptance by replay of all test prompts, and decoding of a few. Rank 0 runs it."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from data.capture.hf import open_capture
from data.progress import tracked
from data.store import HiddenStateStore
from eagle31.export.read import load_export
from eagle31.json_files import write_json
from eagle31.training.batch import PackedBatch
from train.config.run import Stage
from train.config.target import TargetEngine
from train.context import RunContext
from train.drafter.build import build_drafter
from train.evaluation.completing import CompletingTarget, packed
from train.evaluation.measure import (
    Candidate,
    Conditions,
    DecodedSubset,
    Samples,
    candidate_of,
    decode_in_transformers,
    evaluation_json,
    without_vllm,
)
from train.evaluation.replay import replay_greedily, sampling_report
from train.evaluation.vllm import decode_in_vllm, decode_with_mtp_head
from train.report.results import at_draft_length, warnings_of
from train.stages.building import step_dtype
from train.stages.data import SAMPLED
from train.stages.vocab import load_projected, load_vocab
from train.stages.writing import answer_sampling


def evaluate_inputs(context: RunContext) -> dict[str, Any]:
    config = context.config
    inputs: dict[str, Any] = {
        "export": context.artifacts[Stage.export].key,
        "answers": context.artifacts[Stage.answers].key,
        "capture": context.artifacts[Stage.capture].key,
        "draft_tokens": config.evaluate.draft_tokens,
        "decoded_prompts": config.evaluate.decoded_prompts,
        "seed": config.seed,
    }
    if config.target.engine is TargetEngine.vllm:
        # Some of vLLM's arguments change numbers (dtype, quantization).
        inputs |= {"engine": config.target.engine.value, "engine_args": config.vllm.engine_args}
    return inputs


def run_evaluate(context: RunContext, directory: Path) -> dict[str, Any]:
    """Replay all test prompts and decode a few of them with the export, into `evaluation.json`."""
    config, parts, device = context.config, context.target.parts, context.world.device
    evaluate = config.evaluate
    tests = context.artifacts[Stage.answers].dataset("test")
    prompts = [row["input_ids"][: row["num_prompt_tokens"]] for row in tests]
    alone = [row["input_ids"][row["num_prompt_tokens"] :] for row in tests]
    captured = context.artifacts[Stage.capture]
    store = verified(captured.directory / "test")
    conditions = Conditions(evaluate.draft_tokens, evaluate.max_new_tokens, context.target.eos_token_ids)
    decoded, mtp = None, without_vllm(parts)
    if config.target.engine is TargetEngine.vllm:
        # Before a drafter is loaded, because vLLM takes nearly all of the GPU's memory.
        decoded = decode_in_vllm(context, prompts, conditions)
        if parts.has_mtp_head:
            replayed_prompts = [prompts[index] for index in store.sample_ids.tolist()]
            mtp = decode_with_mtp_head(context, replayed_prompts, conditions)
    # Float32 on the CPU, and the dtype of training on a GPU.
    dtype = torch.float32 if device.type == "cpu" else step_dtype(config)
    export = context.artifacts[Stage.export].directory / "checkpoint"
    trained = candidate_of(load_export(export, device, dtype), parts.head, device, dtype)
    if decoded is None:
        capture = open_capture(context.target.spec, parts, context.drafter.aux_layer_ids, device)
        target = CompletingTarget(capture, parts.fingerprint, config.data.regenerate.batch_size)
        chosen = range(min(evaluate.decoded_prompts, len(prompts)))
        decoded, decoded_samples = decode_in_transformers(target, trained, prompts, chosen, conditions)
        del capture, target  # its memory is free for the replay
    else:
        decoded_samples = stored_samples(store, decoded)

    def rows(store: HiddenStateStore, name: str) -> Iterator[PackedBatch]:
        return packed(store[index] for index in tracked(range(len(store)), f"replay, {name}", "prompts"))

    longest = conditions.longest_draft
    both = {
        name: replay_greedily(*candidate, rows(store, name), longest).to_json()
        for name, candidate in (("trained", trained), ("untrained", untrained(context)))
    }
    sampled = None
    if SAMPLED in captured.summary["num_samples"]:
        samples = rows(verified(captured.directory / SAMPLED), SAMPLED)
        sampled = sampling_report(*trained, samples, longest, answer_sampling(context))
    states = f"exact states ({parts.dtype_name}) of capture.source={config.capture.source.value}"
    evaluation = evaluation_json(
        conditions, trained, len(store), both, sampled, mtp, decoded, decoded_samples, alone, states
    )
    write_json(directory / "evaluation.json", evaluation)
    for warning in warnings_of(evaluation):
        print(f"WARNING: {warning}", file=sys.stderr, flush=True)
    length = at_draft_length(both["trained"], evaluate.draft_tokens)["acceptance_length"]
    return {"acceptance_length": length, "k": evaluate.draft_tokens}


def verified(directory: Path) -> HiddenStateStore:
    """Open a store. Raise DamagedShard where a shard was altered."""
    store = HiddenStateStore(directory)
    store.verify()
    return store


def stored_samples(store: HiddenStateStore, decoded: DecodedSubset) -> Samples:
    """Yield the decoded prompts that the target has completed alone, with that completion's states."""
    position = {sample_id: index for index, sample_id in enumerate(store.sample_ids.tolist())}
    for place, index in enumerate(decoded.indices):
        if index in position:
            yield place, store[position[index]]


def untrained(context: RunContext) -> Candidate:
    """Return the drafter as it was before the first step."""
    vocab = load_vocab(context.artifacts[Stage.vocab])
    projected = load_projected(context.artifacts[Stage.train].directory)
    config, device = context.config, context.world.device
    drafter, frozen = build_drafter(config, context.drafter, vocab, projected, device, step_dtype(config))
    drafter = drafter.to(device=device, dtype=frozen.embed_tokens.dtype)
    return drafter.requires_grad_(False), frozen
