"""The export stage: writes the best weights for vLLM and validates them. Rank 0 runs it."""

from pathlib import Path
from typing import Any

from data.target.tokenizer import tokenizer_fingerprint
from eagle31.errors import UserError
from eagle31.export.layouts import Layout, Verifier
from eagle31.export.read import check_weights
from eagle31.export.write import write_export
from train.artifact import EXPORT, Artifact, link_result
from train.config.run import Stage
from train.context import RunContext
from train.drafter.build import frozen_rows
from train.report.card import write_model_card
from train.report.results import Report, untrained_warning
from train.stages.report import describe_run
from train.stages.vocab import load_projected, load_vocab
from train.target import Target
from train.trainer.checkpoints import CheckpointDirectory


def export_inputs(context: RunContext) -> dict[str, Any]:
    export = context.config.export
    inputs: dict[str, Any] = {
        "train": context.artifacts[Stage.train].key,
        "dtype": export.dtype.value,
        "layout": export.layout.value,
    }
    if export.layout is Layout.speculators:
        inputs |= {"target": context.target.spec.model, "draft_tokens": context.config.evaluate.draft_tokens}
    return inputs


def run_export(context: RunContext, directory: Path) -> dict[str, Any]:
    """Write the best weights as a checkpoint for vLLM, into `checkpoint/`.

    Raises:
        UserError: vLLM would not serve the export as it was trained; names what differs. Nothing is written.
    """
    trained = context.artifacts[Stage.train].directory
    checkpoints = CheckpointDirectory(trained / "checkpoints", 1, context.world)
    summary = context.artifacts[Stage.train].summary
    step = summary["best_step"]
    weights = checkpoints.best_weights(step)
    vocab = load_vocab(context.artifacts[Stage.vocab])
    config = context.drafter.config(len(vocab.d2t))
    projected = load_projected(trained)
    embed_tokens, head_rows = frozen_rows(vocab, context.target.parts, context.drafter.initial, projected)
    weights.setdefault("lm_head.weight", head_rows)
    write_export(
        directory / "checkpoint",
        config,
        weights,
        vocab,
        embed_tokens,
        dtype=context.config.export.dtype.value,
        layout=context.config.export.layout,
        provenance=provenance(context.target, step),
        verifier=verifier(context.target, context.config.evaluate.draft_tokens),
    )
    run_info = describe_run(context) | {"export": context.output_dir / "export"}
    if warning := untrained_warning(run_info):
        print(f"export: WARNING: {warning}", flush=True)
    write_model_card(directory / "checkpoint", Report({}, run_info))
    return {"step": step, "validation_acceptance_length": summary["best_validation_acceptance_length"]}


def reopen_if_damaged(export: Artifact) -> None:
    """Have a finished export written again that is not as it was written."""
    if export.finished:
        try:
            check_weights(export.directory / "checkpoint")
        except UserError as error:
            print(f"export: {error}", flush=True)
            export.reopen()


def link_export(context: RunContext) -> None:
    """Have `export` in the output directory be this run's checkpoint."""
    link_result(context.output_dir, EXPORT, context.artifacts[Stage.export].directory / "checkpoint")


def provenance(target: Target, step: int) -> dict[str, Any]:
    """Return what config.json says of the training; of a target in a directory its last name only."""
    settings = target.settings
    model = Path(settings.model)
    return {
        "target": model.resolve().name if model.is_dir() else settings.model,
        "target_revision": settings.revision,
        "target_fingerprint": target.parts.fingerprint,
        "tokenizer_fingerprint": tokenizer_fingerprint(target.tokenizer),
        "template_fingerprint": target.template_fingerprint,
        "step": step,
    }


def verifier(target: Target, draft_tokens: int) -> Verifier:
    """Return the target as a bare `vllm serve EXPORT` finds it, from any working directory."""
    model = Path(target.spec.checkpoint.path)
    return Verifier(
        name_or_path=str(model.resolve()) if model.is_dir() else target.spec.model,
        architectures=tuple(target.parts.config.architectures or ()),
        draft_tokens=draft_tokens,
    )
