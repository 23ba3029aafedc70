"""The cells stage: the target completes the prompts of the robustness matrix. Every rank runs it."""

import hashlib
import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset

from data.capture.opening import StoreSpec
from data.generation.answers import AnswerGenerator, answer_prompts, answers_dataset
from data.rendering.prompts import prompt_ids
from data.samples import CapturedSample
from data.store import DamagedShard, HiddenStateStore
from data.store.codec import Encoding
from data.store.index import STATES_VERSION
from data.text.perturbation import PromptSetting, template_source
from data.text.saved import load_saved
from data.text.schemas import Conversation
from data.text.sources import source_fingerprint
from eagle31.errors import UserError
from eagle31.json_files import read_json, write_json
from train.artifact import Artifact
from train.config.evaluate import MatrixConfig
from train.config.run import Stage, has_cells
from train.context import RunContext
from train.distributed import wait_for
from train.evaluation.cells import (
    EVALUATION,
    LISTING,
    VALIDATION,
    Cell,
    FinishedCell,
    LeftOut,
    RenderedCell,
    listing,
    read_listing,
)
from train.evaluation.domains import prompt_messages
from train.evaluation.matrix_prompts import (
    check_names,
    domain_sources,
    matrix_domains,
    no_validation,
    render_cells,
)
from train.inference.inputs import target_inputs
from train.stages.capture import SOURCE_INPUTS, SOURCES, manifest_fields
from train.stages.data import HELD_OUT_INPUTS, TRAINING_PROMPTS, save_dataset

_RENDERED = "rendered.json"
# Shards are checked when they are read.
_CELL_FILES = ("prompts/*", "states/manifest.json", "states/index.safetensors")


def cells_inputs(context: RunContext) -> dict[str, Any]:
    """Return what the cells depend on, after checking names and sources.

    Raises:
        UserError: a source cannot be read, or a validation cell has a name that no cell has.
    """
    config = context.config
    matrix = config.evaluate.matrix
    if not has_cells(config):
        return {}
    check_names(matrix, domain_sources(matrix))
    data = context.artifacts[Stage.data].inputs
    return {
        "data": {name: data[name] for name in sorted(HELD_OUT_INPUTS)},
        "domains": {
            name: asdict(domain)
            | {
                "source": domain.source
                and source_fingerprint(
                    domain.source,
                    split=domain.split,
                    subset=domain.subset,
                    field=f"evaluate.matrix.domains.{name}.source",
                    cache_dir=context.cache_dir,
                )
            }
            for name, domain in matrix.domains.items()
        },
        "templates": {name: template_source(name) for name in matrix.templates},
        "systems": list(matrix.systems),
        "context_tokens": list(matrix.context_tokens),
        "crossed": matrix.crossed,
        "validation_cells": list(matrix.validation_cells),
        "max_prompt_tokens": max_prompt_tokens(context),
        "completion": completion_inputs(context),
    }


def completion_inputs(context: RunContext) -> dict[str, Any]:
    """Return what a cell's captured completions depend on apart from its prompts."""
    config = context.config
    captured = target_inputs(config.target, context.parts.fingerprint)
    return {
        "written": context.completion_inputs(),
        "captured": captured | SOURCE_INPUTS[config.capture.source](config),
        "source": config.capture.source.value,
        "aux_layer_ids": list(context.aux_layer_ids),
        "eos_token_ids": list(context.eos_token_ids),
        "max_new_tokens": config.evaluate.max_new_tokens,
        "format": STATES_VERSION,
    }


def max_prompt_tokens(context: RunContext) -> int:
    """Return the longest prompt that leaves room for its completion in the target and in the drafter."""
    config, parts = context.config, context.parts
    drafter = context.drafter_config(context.shape.draft_vocab_size or parts.vocab_size)
    positions = getattr(parts.config.get_text_config(), "max_position_embeddings", None)
    room = min(positions or drafter.max_position_embeddings, drafter.max_position_embeddings)
    return min(room, context.longest_held_out) - config.evaluate.max_new_tokens


def run_cells(context: RunContext, directory: Path) -> dict[str, Any]:
    """Complete and capture the cells that are not finished yet, and list all of them in `cells.json`.

    The artifacts of the cells are next to the stage's, so that another matrix reuses those that it shares.
    """
    rendered_path = directory / _RENDERED
    if context.world.is_main:
        write_json(rendered_path, complete_cells(context))
    wait_for(rendered_path)
    content = read_json(rendered_path)
    begun = {cell["artifact"]: cell_artifact(context, cell["inputs"]) for cell in content["cells"]}
    unfinished = [artifact for artifact in begun.values() if not artifact.finished]
    if unfinished:
        specs = [
            StoreSpec(
                one.directory / "states",
                load_saved(one.directory / "prompts"),
                Encoding(),
                context.config.capture.max_refused_fraction,
            )
            for one in unfinished
        ]
        SOURCES[context.config.capture.source](context, specs, manifest_fields(context))
    if not context.world.is_main:
        return {}
    for artifact in unfinished:
        num_tokens = int(HiddenStateStore(artifact.directory / "states").lengths.sum())
        artifact.finish(0.0, {"num_tokens": num_tokens}, _CELL_FILES, context.cache_dir)
    finished = [finished_cell(cell, begun[cell["artifact"]]) for cell in content["cells"]]
    left_out = [LeftOut(**fields) for fields in content["left_out"]]
    write_json(directory / LISTING, listing(finished, left_out))
    return {
        "num_cells": len(finished),
        "num_left_out": len(left_out),
        "num_prompts": sum(len(cell.prompt_ids) for cell in finished),
    }


def complete_cells(context: RunContext) -> dict[str, Any]:
    """Have the target complete the prompts of each cell greedily; return the cells and their artifacts.

    Raises:
        UserError: no cell is left, or a validation cell has no prompts.
    """
    cells, left_out = rendered_cells(context)
    found: list[dict[str, Any]] = []
    artifacts = [cell_artifact(context, cell_inputs(context, cell)) for cell in cells]
    for artifact in artifacts:
        _reopen_damaged(artifact, context.cache_dir)
    missing = [one for one in artifacts if not (one.directory / "prompts").exists()]
    if missing:
        with context.open_generator() as generator:
            for cell, artifact in zip(cells, artifacts, strict=True):
                if not (artifact.directory / "prompts").exists():
                    complete_cell(context, generator, cell, artifact.directory)
    for cell, artifact in zip(cells, artifacts, strict=True):
        if not len(load_saved(artifact.directory / "prompts")):
            reason = "the target completes none of its prompts"
            if cell.purpose == VALIDATION:
                raise no_validation(cell.cell, reason)
            left_out.append(LeftOut(cell.cell.name, reason))
            continue
        found.append(
            {
                "domain": cell.cell.domain,
                "setting": asdict(cell.cell.setting),
                "purpose": cell.purpose,
                "artifact": artifact.key,
                "inputs": artifact.inputs,
            }
        )
    for one in left_out:
        print(f"cells: {one.name} is left out: {one.reason}", flush=True)
    check_left(context.config.evaluate.matrix, found, left_out)
    return {"cells": found, "left_out": [asdict(one) for one in left_out]}


def _reopen_damaged(artifact: Artifact, cache_dir: Path | None) -> None:
    """Have a cell whose files were altered made again, from the completions that are kept next to them."""
    damage = artifact.damage(cache_dir=cache_dir) if artifact.finished else None
    if damage is not None:
        print(f"cells: made again, because {damage}", flush=True)
        artifact.reopen()  # before any rank looks
        shutil.rmtree(artifact.directory / "prompts", ignore_errors=True)


def check_left(matrix: MatrixConfig, found: Sequence[dict[str, Any]], left_out: Sequence[LeftOut]) -> None:
    """Raise UserError if no cell of the evaluation is left."""
    if not any(cell["purpose"] == EVALUATION for cell in found):
        reasons = "; ".join(f"{one.name}: {one.reason}" for one in left_out)
        remedy = f"None of its cells can be measured: {reasons}"
        raise UserError("evaluate.matrix.domains", ", ".join(matrix.domains), remedy)


def rendered_cells(context: RunContext) -> tuple[list[RenderedCell], list[LeftOut]]:
    """Render the prompts of all cells, for evaluation and of some for validation."""
    config = context.config
    directory = context.artifacts[Stage.data].directory
    longest = max_prompt_tokens(context)
    # Validation packs its samples into rows of training.
    limits = {
        EVALUATION: longest,
        VALIDATION: min(longest, config.train.row_tokens - config.evaluate.max_new_tokens),
    }
    held_out = read_json(directory / "held_out.json")
    if not (directory / TRAINING_PROMPTS).exists():
        remedy = "An earlier version wrote it, without what cells need; give another output_dir."
        raise UserError("output_dir", directory, remedy)
    seen = np.load(directory / TRAINING_PROMPTS)

    def render(conversation: Conversation, setting: PromptSetting, documents: Sequence[str]) -> list[int]:
        return prompt_ids(
            context.tokenizer,
            prompt_messages(conversation),
            conversation.tools,
            context.template_kwargs,
            setting,
            documents,
        )

    matrix = config.evaluate.matrix
    return render_cells(matrix, matrix_domains(matrix, held_out, seen, config.seed), render, limits)


def cell_inputs(context: RunContext, cell: RenderedCell) -> dict[str, Any]:
    """Return what a cell's captured completions depend on: its prompts' tokens and how they are completed."""
    prompts = hashlib.sha256(json.dumps([cell.prompt_ids, cell.prompts]).encode()).hexdigest()
    return {"prompts": prompts, **completion_inputs(context)}


def cell_artifact(context: RunContext, inputs: dict[str, Any]) -> Artifact:
    return Artifact.locate(context.output_dir / "artifacts", "cell", inputs)


def complete_cell(
    context: RunContext, generator: AnswerGenerator, cell: RenderedCell, directory: Path
) -> None:
    """Write the prompts with their completions into `prompts/` (Arrow)."""
    completions = answer_prompts(
        generator,
        cell.prompts,
        context.sampling(context.config.evaluate.max_new_tokens, temperature=0.0),
        output=directory / "completions.jsonl",
        model_fingerprint=context.parts.fingerprint,
        progress=True,
    )
    # Where a completion ends at its first token there is no draft.
    kept = [index for index, completion in enumerate(completions) if len(completion) > 1]
    dataset = answers_dataset(
        [cell.prompts[index] for index in kept],
        [completions[index] for index in kept],
        [cell.prompt_ids[index] for index in kept],
    )
    save_dataset(dataset, directory / "prompts")


def finished_cell(cell: dict[str, Any], artifact: Artifact) -> FinishedCell:
    """Return a captured cell; prompts that the engine refused are not in its store."""
    dataset: Dataset = load_saved(artifact.directory / "prompts")
    store = HiddenStateStore(artifact.directory / "states")
    ids, lengths = dataset["id"], dataset["num_prompt_tokens"]
    captured = store.sample_ids.tolist()
    return FinishedCell(
        Cell(cell["domain"], PromptSetting(**cell["setting"])),
        cell["purpose"],
        store.directory,
        tuple(ids[index] for index in captured),
        sum(lengths[index] for index in captured) / len(store),
    )


def run_cells_of(context: RunContext, purpose: str) -> list[FinishedCell]:
    """Return the run's cells of a purpose; none without a matrix."""
    if not has_cells(context.config):
        return []
    cells, _ = read_listing(context.artifacts[Stage.cells].directory)
    return [cell for cell in cells if cell.purpose == purpose]


def verified(context: RunContext, cell: FinishedCell) -> FinishedCell:
    """Compare the checksums of a cell's store; every rank that calls verifies all of it.

    Raises:
        DamagedShard: a shard was altered; the next run captures it again.
    """
    try:
        cell.open().verify(cache_dir=context.cache_dir)
    except DamagedShard:
        Artifact("cell", {}, cell.directory.parent).reopen()
        context.artifacts[Stage.cells].reopen()
        raise
    return cell


def validation_samples(context: RunContext) -> dict[str, list[CapturedSample]]:
    """Return the samples of the validation cells by the cells' names."""
    found: dict[str, list[CapturedSample]] = {}
    for cell in run_cells_of(context, VALIDATION):
        store = verified(context, cell).open()
        found[cell.name] = store.get_many(range(len(store)))
    return found
