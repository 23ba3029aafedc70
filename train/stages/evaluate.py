"""The evaluate stage: acceptance by replay of all test prompts, and decoding of a few. Rank 0 runs it."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from data.capture.hf import HiddenStateCapture
from data.progress import tracked
from data.sampling import Sampling
from data.store import HiddenStateStore
from data.target.cached_decoding import TargetDecoder
from data.target.head import TargetHead
from data.target.loading import load_target
from data.target.modules import locate
from eagle31.export.read import load_export
from eagle31.json_files import write_json
from eagle31.model.drafter import Drafter
from eagle31.model.frozen import FrozenParts
from eagle31.model.vocab import DraftVocab
from train.config.run import RunConfig, Stage
from train.config.target import TargetEngine
from train.context import RunContext
from train.drafter.chosen import ChosenDrafter
from train.evaluation.agreement import Texts, agreement_report, drafted_completions
from train.evaluation.decoding import DecodedSubset, PassResults, decode_prompts, decoding_report, engine_name
from train.evaluation.replay import CompletingTarget, longest_draft, packed, replay_greedily, sampling_report
from train.evaluation.vllm import VllmEvaluation, decode_in_vllm, single_replica
from train.report.results import at_draft_length, warnings_of
from train.stages.training.building import new_drafter, step_dtype
from train.stages.vocab import load_projected, load_vocab

Candidate = tuple[Drafter, FrozenParts]


def evaluate_inputs(context: RunContext) -> dict[str, Any]:
    config = context.config
    inputs: dict[str, Any] = {
        "export": context.artifacts[Stage.export].key,
        "answers": context.artifacts[Stage.answers].key,
        "capture": context.artifacts[Stage.capture].key,
        "draft_tokens": config.evaluate.draft_tokens,
        "decoded_prompts": config.evaluate.decoded_prompts,
        "temperature": temperature_of(context),
        "seed": config.seed,
    }
    if config.target.engine is TargetEngine.vllm:
        # Some of vLLM's arguments change numbers (dtype, quantization).
        inputs |= {"engine": config.target.engine.value, "engine_args": config.vllm.engine_args}
    elif inputs["temperature"]:
        # A sampled completion depends on the other prompts of its batch.
        inputs["batch_size"] = config.data.regenerate.batch_size
    return inputs


def run_evaluate(context: RunContext, directory: Path) -> dict[str, Any]:
    """Replay all test prompts and decode a few of them with the export, into `evaluation.json`.

    Each pass is in `passes/` once it is finished, and is not repeated after an interruption.
    """
    evaluate = context.config.evaluate
    tests = context.artifacts[Stage.answers].dataset("test")
    prompts = [row["input_ids"][: row["num_prompt_tokens"]] for row in tests]
    alone = [row["input_ids"][row["num_prompt_tokens"] :] for row in tests]
    store = HiddenStateStore(context.artifacts[Stage.capture].directory / "test")
    store.verify()
    passes = PassResults(directory / "passes")
    in_vllm = context.config.target.engine is TargetEngine.vllm
    decoded = None
    if in_vllm:
        # Before a drafter is loaded, because vLLM takes nearly all of the GPU's memory.
        settings = vllm_evaluation(context, passes.directory)
        decoded = decode_in_vllm(settings, prompts, evaluate.decoded_prompts)
    device, dtype = context.world.device, step_dtype(context.config)
    export = context.artifacts[Stage.export].directory / "checkpoint"
    trained = exported_drafter(export, context.target.parts.head, device, dtype)
    if decoded is None:
        decoded, texts = decode_in_transformers(context, prompts, alone, trained, passes)
    else:
        texts = stored_texts(store, decoded, alone)
    replayed = replay_store(store, trained, evaluate.draft_tokens, passes, "trained")
    vocab = load_vocab(context.artifacts[Stage.vocab])
    projected = load_projected(context.artifacts[Stage.train].directory)
    before = untrained_drafter(context.config, context.drafter, vocab, projected, device)
    untrained = replay_store(store, before, evaluate.draft_tokens, passes, "untrained")
    evaluation = {
        "k": evaluate.draft_tokens,
        "max_new_tokens": evaluate.max_new_tokens,
        "num_prompts": len(store),
        "engine": decoded.engine,
        "states": described_states(context),
        "trained": replayed,
        "untrained": untrained,
        "sampling": decoded.sampling,
        "decoding": decoding_report(decoded.served, evaluate.draft_tokens)
        | agreement_report(*trained, texts, decoded.dtype),
    }
    write_json(directory / "evaluation.json", evaluation)
    for warning in warnings_of(evaluation):
        print(f"WARNING: {warning}", file=sys.stderr, flush=True)
    length = at_draft_length(replayed, evaluate.draft_tokens)["acceptance_length"]
    return {"acceptance_length": length, "k": evaluate.draft_tokens}


def temperature_of(context: RunContext) -> float:
    """Return the temperature for sampling: by default that at which training data is regenerated."""
    config = context.config
    for given in (config.evaluate.temperature, config.data.regenerate.temperature):
        if given is not None:
            return given
    return float(context.target.parts.sampling["temperature"])


def described_states(context: RunContext) -> str:
    """Return how the states that are replayed were captured, for messages."""
    dtype = str(context.target.parts.dtype).removeprefix("torch.")
    return f"exact states ({dtype}) of capture.source={context.config.capture.source.value}"


def vllm_evaluation(context: RunContext, passes: Path) -> VllmEvaluation:
    """Return what vLLM needs to decode with this run's export.

    Args:
        passes: the directory of finished passes.
    """
    evaluate, parts = context.config.evaluate, context.target.parts
    drafter = context.drafter.config()
    target_positions = getattr(parts.config.get_text_config(), "max_position_embeddings", None)
    return VllmEvaluation(
        target=context.target.spec,
        target_dtype=parts.dtype,
        export=context.artifacts[Stage.export].directory / "checkpoint",
        max_positions=min(
            target_positions or drafter.max_position_embeddings, drafter.max_position_embeddings
        ),
        stop_token_ids=context.target.eos_token_ids,
        draft_tokens=evaluate.draft_tokens,
        max_new_tokens=evaluate.max_new_tokens,
        temperature=temperature_of(context),
        seed=context.config.seed,
        on_cpu=context.world.device.type == "cpu",
        engine_args=single_replica(context.config.vllm.engine_args),
        log=context.output_dir / "vllm-evaluate.log",
        passes=passes,
    )


def decode_in_transformers(
    context: RunContext,
    prompts: Sequence[Sequence[int]],
    alone: Sequence[Sequence[int]],
    trained: Candidate,
    passes: PassResults,
) -> tuple[DecodedSubset, Texts]:
    """Decode the first prompts with eagle31's decoder, and replay sampled completions of all prompts."""
    evaluate, eos = context.config.evaluate, context.target.eos_token_ids
    model = load_target(context.target.spec, context.world.device)
    modules = locate(model)
    chosen = prompts[: evaluate.decoded_prompts]
    served = decode_prompts(
        TargetDecoder(model, modules, context.drafter.aux_layer_ids),
        *trained,
        chosen,
        draft_tokens=evaluate.draft_tokens,
        max_new_tokens=evaluate.max_new_tokens,
        eos_token_ids=eos,
        passes=passes,
    )
    completing = CompletingTarget(
        HiddenStateCapture(model, modules, context.drafter.aux_layer_ids),
        context.target.parts.fingerprint,
        context.config.data.regenerate.batch_size,
    )

    temperature = temperature_of(context)

    def sample() -> dict[str, Any]:
        sampling = Sampling(evaluate.max_new_tokens, eos, temperature, context.config.seed)
        completions = completing.complete(prompts, sampling, passes.directory / "sampled.jsonl")
        rows = packed(completing.samples(prompts, completions))
        report = sampling_report(*trained, rows, longest_draft(evaluate.draft_tokens), temperature)
        return {"sampling": report}

    sampled = None
    if temperature:
        sampled = passes.run("sampling", sample)["sampling"]
    engine = engine_name(model.dtype, context.world.device)
    decoded = DecodedSubset(engine, range(len(chosen)), served, sampled, model.dtype)
    return decoded, completing.texts(chosen, drafted_completions(served, alone[: len(chosen)]))


def replay_store(
    store: HiddenStateStore, candidate: Candidate, draft_tokens: int, passes: PassResults, name: str
) -> dict[str, Any]:
    """Return acceptance over the target's greedy completions, which needs no target."""

    def compute() -> dict[str, Any]:
        samples = tracked(range(len(store)), f"replay, {name}", "prompts")
        rows = packed(store[index] for index in samples)
        return replay_greedily(*candidate, rows, longest_draft(draft_tokens)).to_json()

    return passes.run(name, compute)


def stored_texts(store: HiddenStateStore, decoded: DecodedSubset, alone: Sequence[Sequence[int]]) -> Texts:
    """Return each completion with the stored sample of its prompt, which the target has completed alone."""
    position = {sample_id: index for index, sample_id in enumerate(store.sample_ids.tolist())}
    completions = drafted_completions(decoded.served, [alone[index] for index in decoded.indices])
    return [
        (store[position[index]], one)
        for index, one in zip(decoded.indices, completions, strict=True)
        if index in position
    ]


def exported_drafter(
    export: Path, head: TargetHead, device: torch.device, training_dtype: torch.dtype
) -> Candidate:
    """Load the export, in float32 on the CPU and in the dtype of training on a GPU."""
    dtype = torch.float32 if device.type == "cpu" else training_dtype
    loaded = load_export(export, device, dtype)
    frozen = FrozenParts(loaded.embed_tokens, head.to(device), loaded.draft_target_ids, lm_head=None)
    return loaded.drafter, frozen


def untrained_drafter(
    config: RunConfig,
    chosen: ChosenDrafter,
    vocab: DraftVocab,
    projected: Mapping[str, Tensor],
    device: torch.device,
) -> Candidate:
    """Build the drafter as it was before the first step."""
    drafter, frozen = new_drafter(config, chosen, vocab, projected, device)
    drafter = drafter.to(device=device, dtype=frozen.embed_tokens.dtype)
    return drafter.requires_grad_(False), frozen
