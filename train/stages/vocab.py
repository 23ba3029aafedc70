"""The vocab stage: builds the draft vocabulary. Rank 0 runs it."""

from pathlib import Path
from typing import Any

from torch import Tensor

from eagle31.json_files import write_json
from eagle31.model.vocab import DraftVocab, build_draft_vocab, coverage
from eagle31.tensor_files import load_tensors, save_tensors
from train.artifact import Artifact
from train.config.run import Stage
from train.context import RunContext
from train.drafter.build import projected_rows
from train.drafter.chosen import ChosenDrafter
from train.drafter.published import starting_vocab
from train.stages.continuing import VOCAB, kept_vocab
from train.stages.data import TOKEN_COUNTS


def vocab_inputs(context: RunContext) -> dict[str, Any]:
    inputs: dict[str, Any] = {
        "data": context.artifacts[Stage.data].key,
        "draft_vocab_size": context.drafter.settings.draft_vocab_size,
    }
    if context.drafter.initial_fingerprint is not None:
        inputs["init_from"] = context.drafter.initial_fingerprint
    elif projects(context.drafter):
        inputs["projection"] = {
            "hidden_size": context.config.drafter.hidden_size,
            "target": context.target.parts.fingerprint,
        }
    return inputs | kept_vocab(context.config, context.drafter, context.artifacts[Stage.data])


def run_vocab(context: RunContext, directory: Path) -> dict[str, Any]:
    """Choose the assistant's most frequent tokens and write `vocab.safetensors` with d2t and t2d.

    For a drafter of another width it has the target's rows too, projected to that width.

    A drafter that starts from a checkpoint keeps its vocabulary, for which the checkpoint's head was trained,
    and so does a training that continues on other data.
    """
    counts = load_tensors(context.artifacts[Stage.data].directory / TOKEN_COUNTS)["counts"]
    special = set(context.target.tokenizer.all_special_ids) | set(context.target.eos_token_ids)
    if kept_vocab(context.config, context.drafter, context.artifacts[Stage.data]):
        kept = load_tensors(context.artifacts[Stage.train].directory / VOCAB)
        vocab = DraftVocab(kept["d2t"], kept["t2d"], coverage(counts, kept["t2d"]))
    elif context.drafter.initial is not None:
        vocab = starting_vocab(context.drafter.initial, counts)
    else:
        vocab = build_draft_vocab(counts, context.drafter.settings.draft_vocab_size, special)
    tensors = {"d2t": vocab.d2t, "t2d": vocab.t2d}
    if projects(context.drafter):
        width = context.config.drafter.hidden_size
        assert width is not None
        tensors |= projected_rows(width, vocab, context.target.parts)
    save_tensors(tensors, directory / VOCAB)
    summary = {"draft_vocab_size": len(vocab.d2t), "coverage": vocab.coverage}
    write_json(directory / "vocab.json", summary)
    return summary


def projects(drafter: ChosenDrafter) -> bool:
    """Whether the drafter has another width than the target, and no checkpoint that brings its rows."""
    settings, widths = drafter.settings, (None, drafter.target.parts.hidden_size)
    return settings.init_from is None and settings.hidden_size not in widths


def load_projected(training: Path) -> dict[str, Tensor]:
    """Return the projected rows that a training keeps; none for a drafter of the target's width."""
    tensors = load_tensors(training / VOCAB)
    return {name: tensors[name] for name in tensors.keys() - {"d2t", "t2d"}}


def load_vocab(artifact: Artifact) -> DraftVocab:
    tensors = load_tensors(artifact.directory / VOCAB)
    coverage = artifact.read("vocab.json")["coverage"]
    return DraftVocab(tensors["d2t"], tensors["t2d"], coverage)
