"""Stages after the export: evaluate, report. Rank 0 runs them."""

import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import load_from_disk

from data.store import HiddenStateStore
from data.target.cached_decoding import TargetDecoder
from eagle31.export.read import load_export
from eagle31.json_files import read_json, write_json
from eagle31.model.drafter import Drafter
from eagle31.model.frozen import FrozenParts
from train.capture_config import CaptureMode
from train.config import Stage, TargetEngine
from train.context import EMBEDDED, RunContext
from train.evaluation import greedy_report, plain_texts, replay_by_length, sampling_report
from train.fit_stage import build_drafter
from train.model_card import write_model_card
from train.report import format_table, write_report
from train.text_stages import load_vocab
from train.versions import git_revision, package_versions
from train.vllm_evaluation import decode_in_vllm

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
        # Its arguments may change numbers (dtype, quantization) and do change how fast it is.
        inputs |= {"engine": config.target.engine.value, "engine_args": config.vllm.engine_args}
    return inputs


def run_evaluate(context: RunContext, directory: Path) -> dict[str, Any]:
    """Decodes the test prompts with the exported weights, and replays their answers: `evaluation.json`."""
    evaluate = context.config.evaluate
    tests = load_from_disk(str(context.artifacts[Stage.answers].directory / "test"))
    prompts = [row["input_ids"][: row["num_prompt_tokens"]] for row in tests]
    store = HiddenStateStore(context.artifacts[Stage.capture].directory / "test")
    store.verify()
    in_vllm = context.config.target.engine is TargetEngine.vllm
    # Before a drafter is loaded: the engine wants the GPU for itself.
    decoded = decode_in_vllm(context, prompts) if in_vllm else None
    trained = exported_drafter(context)
    fresh = untrained_drafter(context) if evaluate.untrained else None
    if decoded is None:
        decoded = decode_in_transformers(context, prompts, trained, fresh)
    evaluation = {
        "k": evaluate.draft_tokens,
        "max_new_tokens": evaluate.max_new_tokens,
        **decoded,
        **replayed(context, store, trained, fresh),
    }
    write_json(directory / "evaluation.json", evaluation)
    return {"acceptance_length": evaluation["greedy"]["acceptance_length"], "k": evaluate.draft_tokens}


def decode_in_transformers(
    context: RunContext, prompts: Sequence[Sequence[int]], trained: Candidate, fresh: Candidate | None
) -> dict[str, Any]:
    """What decoding gives of `evaluation.json`, by eagle31's own engine."""
    evaluate, device = context.config.evaluate, context.world.device
    model, modules = context.load_target()
    target = TargetDecoder(model, modules, context.aux_layer_ids)
    limits: dict[str, Any] = {
        "max_new_tokens": evaluate.max_new_tokens,
        "eos_token_ids": context.eos_token_ids,
    }
    plain = plain_texts(target, prompts, device=device, **limits)
    chain: dict[str, Any] = {"draft_tokens": evaluate.draft_tokens, **limits}
    greedy = greedy_report(target, *trained, prompts, plain, **chain, label="speculative decoding")
    untrained = fresh and greedy_report(target, *fresh, prompts, plain, **chain, label="untrained")
    sampling = None
    if evaluate.sampling:
        sampling = sampling_report(
            target,
            *trained,
            prompts,
            **chain,
            temperature=evaluate.temperature,
            seed=context.config.seed,
            device=device,
        )
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
    """What replay gives of `evaluation.json`; it needs no target."""
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
    """What lies in the export, in float32 on the CPU and in its own dtype elsewhere."""
    device = context.world.device
    dtype = torch.float32 if device.type == "cpu" else context.dtype
    loaded = load_export(context.artifacts[Stage.export].directory / "checkpoint", device, dtype)
    frozen = FrozenParts(
        loaded.embed_tokens, context.parts.head.to(device), loaded.draft_target_ids, lm_head=None
    )
    return loaded.drafter, frozen


def untrained_drafter(context: RunContext) -> Candidate:
    """The drafter as it was before the first step."""
    drafter, frozen = build_drafter(context, load_vocab(context.artifacts[Stage.vocab]))
    drafter = drafter.to(device=context.world.device, dtype=frozen.embed_tokens.dtype)
    return drafter.requires_grad_(False), frozen


def run_report(context: RunContext) -> str:
    """Writes `report/` and the export's model card with the measured numbers; returns the table to print."""
    evaluation = read_json(context.artifacts[Stage.evaluate].directory / "evaluation.json")
    facts = run_facts(context) | {"export": context.output_dir / "export"}
    metrics = context.artifacts[Stage.train].directory / "metrics.jsonl"
    facts["report"] = write_report(context.output_dir, metrics, evaluation, facts)
    export = context.artifacts[Stage.export].directory / "checkpoint"
    write_model_card(export, facts, evaluation, read_json(export / "config.json"))
    return format_table(evaluation, facts)


def run_facts(context: RunContext) -> dict[str, Any]:
    """What the report and the model card say of the run."""
    config = context.config
    records = {
        stage.value: artifact.record for stage, artifact in context.artifacts.items() if artifact.finished
    }
    data, vocab, training = (records[name]["facts"] for name in ("data", "vocab", "train"))
    captured = records["capture"]["facts"] if config.capture.mode is CaptureMode.offline else {}
    return {
        "recipe": config.recipe_name,
        "target": context.spec.model,
        "target_embedded": config.target.model == EMBEDDED,
        "train_data": config.data.train,
        "drafter_parameters": training["drafter_parameters"],
        "aux_layer_ids": list(context.aux_layer_ids),
        "draft_vocab_size": vocab["draft_vocab_size"],
        "vocab_coverage": vocab["coverage"],
        "num_samples": captured.get("num_samples", {}).get("train", data["num_samples"]),
        "num_tokens": captured.get("num_tokens", {}).get("train", data.get("num_tokens")),
        "ttt_steps": config.train.ttt_steps,
        "layout": config.export.layout.value,
        "steps": training["steps"],
        "best_step": training["best_step"],
        "regenerated": config.data.regenerate.enabled,
        "versions": package_versions(),
        "python": platform.python_version(),
        "git_revision": git_revision(),
        "stages": [
            {"name": name, "seconds": record["seconds"], "reused": name in context.reused}
            for name, record in records.items()
        ],
    }
