"""What is measured of each trained drafter: acceptance in every cell by replay, and drift in some cells."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from data.batches.rows import pack_row
from data.samples import CapturedSample
from eagle31.json_files import read_json, write_json
from eagle31.model.drafter import Drafter
from eagle31.model.frozen import FrozenParts
from eagle31.training.drift import choose_rows, measure_drift
from train.artifact import Artifact
from train.evaluation.matrix import Cell
from train.evaluation.replay import (
    MAX_DRAFT_TOKENS,
    CompletingTarget,
    PromptAcceptance,
    packed,
    replay_greedily,
)
from train.experiments.quality.acceptance import drafter_of, own_drafter
from train.experiments.quality.dataset import Dataset, load_vocab
from train.experiments.quality.runs import Run

DRIFT_TOKENS, DRIFT_POSITIONS = 8192, 512
_FORMAT = 1


def measure_variant(
    dataset: Dataset,
    run: Run,
    result: dict[str, Any],
    directory: Path,
    completing: CompletingTarget,
    cells: Sequence[Cell],
) -> dict[str, Any]:
    """Return the counts of each cell by its key, of the last weights of a run.

    Results are kept in `cells/` of the run, one file for each cell, and are not measured twice.
    """
    kept = {cell.key: directory / "cells" / f"{cell.key}.json" for cell in cells}
    missing = [cell for cell in cells if not _is_current(kept[cell.key])]
    if missing:
        drafter, frozen = trained_drafter(dataset, run, result, directory)
        for cell in missing:
            write_json(kept[cell.key], {"format": _FORMAT} | measure_cell(drafter, frozen, completing, cell))
    return {key: read_json(path) for key, path in kept.items()}


def trained_drafter(
    dataset: Dataset, run: Run, result: dict[str, Any], directory: Path
) -> tuple[Drafter, FrozenParts]:
    """Return the drafter with the last kept weights of a run."""
    inputs = Artifact("train", {}, directory / result["artifact"]).manifest["inputs"]
    own = own_drafter(dataset, run, load_vocab(directory / "artifacts" / inputs["vocab"]))
    return drafter_of(dataset, own, directory / result["kept"][-1]["checkpoint"])


def measure_cell(
    drafter: Drafter, frozen: FrozenParts, completing: CompletingTarget, cell: Cell
) -> dict[str, Any]:
    """Return the counts of a cell by draft length and prompt, those by position, and the drift."""
    acceptance = replay_greedily(drafter, frozen, packed(cell.samples(completing)))
    return acceptance.counts() | {
        "by_position": by_position(acceptance),
        "drift": drift(drafter, frozen, cell.samples(completing)),
    }


def by_position(acceptance: PromptAcceptance) -> list[list[float]]:
    """Return the accepted tokens of the longest drafts by position and prompt, [K, P]."""
    longest = [lengths[-1].accepted_per_position for lengths in acceptance.by_prompt]
    return [list(position) for position in zip(*longest, strict=True)]


def drift(drafter: Drafter, frozen: FrozenParts, samples: Iterator[CapturedSample]) -> dict[str, Any] | None:
    """Return the record of drift over the first samples; None if none supervises a draft."""
    used: list[CapturedSample] = []
    num_tokens = 0
    for sample in samples:
        if used and num_tokens + len(sample.input_ids) > DRIFT_TOKENS:
            break
        used.append(sample)
        num_tokens += len(sample.input_ids)
    if not used:
        return None
    batch = pack_row(used, num_tokens)
    chosen = choose_rows(batch, MAX_DRAFT_TOKENS, DRIFT_POSITIONS)
    if chosen is None:
        return None
    on_device = batch.to(frozen.embed_tokens.device, frozen.embed_tokens.dtype)
    return measure_drift(drafter, frozen, chosen, on_device).record()


def _is_current(path: Path) -> bool:
    return path.exists() and read_json(path).get("format") == _FORMAT
