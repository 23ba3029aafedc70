"""The report stage: writes the report and the model card. Rank 0 runs it."""

import platform
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from data.target.served import architecture
from eagle31.export.layouts import read_raw_config, served_method
from train.config.capture import CaptureMode
from train.config.run import Stage
from train.config.target import EMBEDDED
from train.context import RunContext
from train.report.card import write_model_card
from train.report.results import format_results, read_report
from train.versions import git_revision, package_versions


def run_report(context: RunContext) -> str:
    """Write `report/` and the export's model card with the measured numbers; return the table to print."""
    # Imported here: matplotlib takes a second, which the other stages need not wait for.
    from train.report.report import write_report

    evaluation = context.artifacts[Stage.evaluate].read("evaluation.json")
    export = {"export": context.output_dir / "export", "export_key": context.artifacts[Stage.export].key}
    run_info = describe_run(context) | export
    metrics = context.artifacts[Stage.train].directory / "metrics.jsonl"
    run_info["report"] = write_report(context.output_dir, metrics, evaluation, run_info)
    report = read_report(context.output_dir)
    write_model_card(context.artifacts[Stage.export].directory / "checkpoint", report)
    return format_results(evaluation, run_info, report.serving)


def describe_run(context: RunContext) -> dict[str, Any]:
    """Return what the report and the model card say about the run."""
    config = context.config
    artifacts = context.artifacts
    data, vocab, training = (artifacts[stage].summary for stage in (Stage.data, Stage.vocab, Stage.train))
    sources = [config.data.train] if config.data.train else [o.source for o in config.data.sources.values()]
    captured = artifacts[Stage.capture].summary if config.capture.mode is CaptureMode.offline else {}
    return {
        "recipe": config.recipe_name,
        "settings": OmegaConf.to_container(OmegaConf.structured(config), enum_to_str=True),
        "target": _located(context.target.spec.model),
        "target_revision": config.target.revision,
        "trust_remote_code": config.target.trust_remote_code,
        "target_fingerprint": context.target.parts.fingerprint,
        "architecture": architecture(context.target.parts.config),
        "target_embedded": config.target.model == EMBEDDED,
        "train_data": [_located(name) for name in sources],
        "template_kwargs": config.data.template_kwargs,
        "drafter_parameters": training["drafter_parameters"],
        "aux_layer_ids": list(context.drafter.aux_layer_ids),
        "draft_vocab_size": vocab["draft_vocab_size"],
        "vocab_coverage": vocab["coverage"],
        "num_samples": captured.get("num_samples", {}).get("train", data["num_samples"]),
        "num_tokens": captured.get("num_tokens", {}).get("train", data["num_tokens"]),
        "ttt_steps": config.train.ttt_steps,
        "layout": config.export.layout.value,
        "method": served_method(read_raw_config(artifacts[Stage.export].directory / "checkpoint")),
        "device": context.world.device.type,
        "steps": training["steps"],
        "best_step": training["best_step"],
        "regenerated": config.data.regenerate.enabled,
        "versions": package_versions(),
        "python": platform.python_version(),
        "git_revision": git_revision(),
        "stages": [
            {"name": stage.value, "seconds": artifact.manifest["seconds"]}
            for stage, artifact in artifacts.items()
            if artifact.finished
        ],
    }


def _located(name: str) -> str:
    """Return a local path as an absolute one, which nothing takes for a Hub id, and another name as it is."""
    path = Path(name).expanduser()
    return str(path.absolute()) if path.exists() else name
