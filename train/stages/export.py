"""The export stage: writes the best weights for vLLM and validates them. Rank 0 runs it."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from data.batches.rows import pack_row
from data.conversations.template import template_fingerprint
from data.store import HiddenStateStore
from data.target.tokenizer import tokenizer_fingerprint
from eagle31.errors import UserError
from eagle31.export.layouts import Layout, Verifier
from eagle31.export.verification import (
    Probe,
    TrainingRecord,
    make_probe,
    probe_piece,
    tensor_hashes,
    write_verification,
)
from eagle31.export.write import DTYPES, served_tensors, write_export
from eagle31.json_files import read_json
from eagle31.model.config import DrafterConfig
from eagle31.model.drafter import Drafter
from train.config.run import Stage
from train.context import RunContext
from train.drafter.build import frozen_rows
from train.drafter.export_checks import require_valid
from train.reporting.model_card import untrained_warning, write_model_card
from train.stages.report import describe_run
from train.stages.vocab import load_vocab
from train.trainer.checkpoints import CheckpointDirectory


def export_inputs(context: RunContext) -> dict[str, Any]:
    export = context.config.export
    inputs: dict[str, Any] = {
        "train": context.artifacts[Stage.train].key,
        "dtype": export.dtype.value,
        "layout": export.layout.value,
    }
    if context.config.train.ema_decay is not None:
        inputs["averaged"] = export.averaged
    if export.layout is Layout.speculators:
        inputs |= {"target": context.spec.model, "draft_tokens": context.config.evaluate.draft_tokens}
    return inputs


def run_export(context: RunContext, directory: Path) -> dict[str, Any]:
    """Write the best weights as a checkpoint for vLLM, into `checkpoint/`.

    Raises:
        UserError: vLLM would not serve the export as it was trained; names what differs. Nothing is written.
    """
    trained = context.artifacts[Stage.train].directory
    checkpoints = CheckpointDirectory(trained / "checkpoints", 1, context.world)
    weights, best = checkpoints.best_weights(averaged=context.config.export.averaged)
    vocab = load_vocab(context.artifacts[Stage.vocab])
    config = context.drafter_config(len(vocab.d2t))
    embed_tokens, head_rows = frozen_rows(config, vocab, context.parts, context.initial)
    weights.setdefault("lm_head.weight", head_rows)
    dtype, layout = context.config.export.dtype.value, context.config.export.layout
    written: dict[str, Any] = {"dtype": dtype, "layout": layout}
    record = TrainingRecord(
        config=config,
        dtype=dtype,
        layout=layout.value,
        step=best["step"],
        target=target_identity(context),
        tensors=tensor_hashes(served_tensors(config, weights, vocab, embed_tokens, **written)),
    )
    probe = held_out_probe(context, config, weights, embed_tokens)

    def complete(partial: Path) -> None:
        write_verification(partial, record, probe)
        require_valid(partial, context.spec)

    write_export(
        directory / "checkpoint",
        config,
        weights,
        vocab,
        embed_tokens,
        provenance=provenance(record),
        verifier=verifier(context),
        complete=complete,
        **written,
    )
    run_info = describe_run(context) | {"export": context.output_dir / "export"}
    if warning := untrained_warning(run_info):
        print(f"export: WARNING: {warning}", flush=True)
    exported = read_json(directory / "checkpoint" / "config.json")
    write_model_card(directory / "checkpoint", run_info, {}, exported)
    return {"step": best["step"], "validation_acceptance_length": best["acceptance_length"]}


def target_identity(context: RunContext) -> dict[str, Any]:
    """Return the identity of the target that the drafter is trained for."""
    return {
        "model": context.config.target.model,
        "revision": context.config.target.revision,
        "fingerprint": context.parts.fingerprint,
        "tokenizer_fingerprint": tokenizer_fingerprint(context.tokenizer),
        "template_fingerprint": template_fingerprint(context.tokenizer, context.template_kwargs),
    }


def provenance(record: TrainingRecord) -> dict[str, Any]:
    """Return the short form of the training record that config.json carries."""
    target = record.target
    return {
        "target": target["model"],
        "target_revision": target["revision"],
        "target_fingerprint": target["fingerprint"],
        "tokenizer_fingerprint": target["tokenizer_fingerprint"],
        "template_fingerprint": target["template_fingerprint"],
        "step": record.step,
    }


def verifier(context: RunContext) -> Verifier:
    """Return the target as a bare `vllm serve EXPORT` finds it, from any working directory."""
    model = Path(context.spec.checkpoint.path)
    return Verifier(
        name_or_path=str(model.resolve()) if model.is_dir() else context.spec.model,
        architectures=tuple(context.parts.config.architectures or ()),
        draft_tokens=context.config.evaluate.draft_tokens,
    )


def held_out_probe(
    context: RunContext, config: DrafterConfig, weights: dict[str, Tensor], embed_tokens: Tensor
) -> Probe:
    """Record what the drafter, with weights rounded as exported, drafts on a held-out sample."""
    num_steps = max(context.config.train.ttt_steps, context.config.evaluate.draft_tokens)
    store = HiddenStateStore(context.artifacts[Stage.capture].directory / "validation")
    drafter = Drafter(config)
    dtype = DTYPES[context.config.export.dtype.value]
    drafter.load_state_dict({name: tensor.to(dtype).float() for name, tensor in weights.items()})
    for index in range(len(store)):
        sample = store[index]
        piece = probe_piece(pack_row([sample], len(sample.input_ids)), num_steps)
        if piece is not None:
            return make_probe(drafter, embed_tokens.to(torch.float32), piece, num_steps)
    raise UserError("data.num_validation", len(store), "No held-out completion is long enough to draft in.")
