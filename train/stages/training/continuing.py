"""Continuing a training: which checkpoint it is, and how its run begins."""

import hashlib
import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from eagle31.errors import UserError
from eagle31.tensor_files import load_tensors
from train.artifact import Artifact
from train.config.run import Stage
from train.config.training import AUTO, NONE
from train.context import RunContext
from train.distributed import World, on_main_first, read_when_set, shared_values
from train.stages.training.inputs import fixed_inputs, order_key, validation_key
from train.trainer.checkpoints import TrainState
from train.trainer.continuation import (
    VOCAB,
    BegunTraining,
    EarlierTraining,
    begin,
    begun_trainings,
    check_steps,
    find_earlier,
    parse_origin,
)

KEPT = "kept"  # the input of the vocab stage that says which earlier vocabulary it keeps
_EARLIER, _CONTINUED = "stages/train/earlier", "stages/train/continued"
_LINKED = (Stage.data, Stage.vocab, Stage.answers, Stage.capture)


def share_earlier(context: RunContext) -> UserError | None:
    """Set `context.earlier` as rank 0 finds it. Every rank calls, before the stages are located.

    Returns:
        Why there is no earlier training, on rank 0; it matters only if this run has to begin one.
    """
    values, problem = shared_values(), None
    if context.world.is_main:
        earlier, problem = _earlier(context)
        values.set(_EARLIER, json.dumps(earlier and earlier.to_json()))
    found = json.loads(read_when_set(values, _EARLIER))
    context.earlier = found and EarlierTraining.from_json(found)
    return problem


def _earlier(context: RunContext) -> tuple[EarlierTraining | None, UserError | None]:
    origin = context.config.train.continue_from
    if origin == NONE:
        return None, None
    fixed, problem = fixed_inputs(context), None
    if origin != AUTO:
        path, step = parse_origin(origin)
        try:
            return find_earlier(path, step, fixed, named=True), None
        except UserError as error:
            problem = error
    # The checkpoint that this run once continued may be gone; the run's own training has its vocabulary.
    try:
        return find_earlier(context.output_dir, None, fixed, named=False), problem
    except UserError as error:
        return None, problem or error


def share_continued(context: RunContext, inputs: dict[str, Any], problem: UserError | None) -> None:
    """Set `context.continued` as rank 0 decides. Every rank calls, once the stages before are located.

    A training that was begun with the same settings continues what it did then, so that it is found again.

    Args:
        inputs: of the train stage, apart from what it continues.
        problem: what `share_earlier` returned.

    Raises:
        UserError: on rank 0; the user named an earlier training, or continues it with other data, and it
            cannot be continued with these settings.
    """
    values = shared_values()
    if context.world.is_main:
        begun = _begun(context, inputs)
        continued = begun.continued if begun else _continued(context, inputs, problem)
        values.set(_CONTINUED, json.dumps(continued and continued.to_json()))
    found = json.loads(read_when_set(values, _CONTINUED))
    context.continued = found and EarlierTraining.from_json(found)


def _begun(context: RunContext, inputs: dict[str, Any]) -> BegunTraining | None:
    """Return the training of these settings that was begun before."""
    origin = context.config.train.continue_from
    for begun in begun_trainings(context.output_dir, inputs):
        if origin == NONE:
            found = begun.continued is None
        else:
            found = origin == AUTO or begun.is_from(*parse_origin(origin))
        if found:
            return begun
    return None


def _continued(
    context: RunContext, inputs: dict[str, Any], problem: UserError | None
) -> EarlierTraining | None:
    origin = context.config.train.continue_from
    if origin == NONE:
        return None
    try:
        if problem is not None:
            raise problem
        if context.earlier is not None:
            check_steps(context.earlier, context.config.train.max_steps, inputs)
    except UserError as error:
        # A draft vocabulary that was kept for the drafter of the earlier training is not for a new one.
        if origin != AUTO or KEPT in context.artifacts[Stage.vocab].inputs:
            raise
        print(f"train: starts at the first step: {error.remedy}", flush=True)
        return None
    return context.earlier


def begin_training(context: RunContext) -> None:
    """Write what the training depends on, and take over the checkpoint that it continues. Rank 0 calls.

    Raises:
        UserError: the earlier training deleted the checkpoint in the meantime.
    """
    artifact, continued = context.artifacts[Stage.train], context.continued
    if begin(artifact.directory, artifact.inputs, continued):
        assert continued is not None
        print(f"train: continues {continued.directory} after step {continued.step}", flush=True)


def link_results(context: RunContext, stages: Sequence[Stage]) -> None:
    """Link the results that the earlier training's run has for this one. Rank 0 calls."""
    for stage in stages:
        here = context.artifacts[stage].directory
        if here.is_symlink() and not here.exists():
            here.unlink()  # that run was deleted
        if stage not in _LINKED or context.earlier is None or here.exists():
            continue
        there = context.earlier.artifacts / here.name
        if (there / "stage.json").exists():
            here.parent.mkdir(parents=True, exist_ok=True)
            os.symlink(there.resolve(), here, target_is_directory=True)


def kept_vocab(context: RunContext, natural_key: str) -> str | None:
    """Return the hash of the draft vocabulary that a continued training keeps; None if it has no choice.

    The draft head belongs to one vocabulary, so that other data must not change it.

    Args:
        natural_key: the name of the vocabulary's artifact if the data alone decided.
    """
    drafter, earlier = context.config.drafter, context.earlier
    if drafter.draft_vocab_size is None or drafter.init_from is not None or earlier is None:
        return None
    for artifacts in (context.output_dir / "artifacts", earlier.artifacts):
        # One that was found damaged, and is made again, has no manifest.
        if any((artifacts / natural_key / name).exists() for name in ("stage.json", "vocab.json")):
            return None
    d2t = load_tensors(earlier.directory / VOCAB)["d2t"]
    return hashlib.sha256(d2t.numpy().tobytes()).hexdigest()[:12]


def keep_vocab(artifact: Artifact, directory: Path, world: World) -> None:
    """Keep the draft vocabulary with the checkpoints, for trainings that continue them.

    Raises:
        UserError: the training that this one continues has another one.
    """
    ours, kept = artifact.directory / VOCAB, directory / VOCAB
    on_main_first(world.is_main, lambda: None if kept.exists() else _copy(ours, kept))
    if not torch.equal(load_tensors(ours)["d2t"], load_tensors(kept)["d2t"]):
        raise UserError(
            "train.continue_from",
            directory,
            f"The training that this one continues has another draft vocabulary than {ours}, which was made "
            "in output_dir before. Give another output_dir.",
        )


def _copy(source: Path, copy: Path) -> None:
    partial = copy.with_name(f".{copy.name}.partial")
    shutil.copyfile(source, partial)
    os.replace(partial, copy)


def prepared(state: TrainState, context: RunContext) -> TrainState:
    """Return the state with which the loop begins.

    With the data of before, the order of its rows continues. With other data, or rows of another length, a
    new epoch begins. If the held-out prompts are others, the best weights are chosen again.
    """
    order, validated_on = order_key(context.artifacts[Stage.train].inputs), validation_key(context)
    if state.order != order:
        begun = state.epoch + (1 if state.row else 0)
        state = replace(state, order=order, epoch=begun, row=0, first_epoch=begun)
    if state.validated_on != validated_on:
        state = replace(state, validated_on=validated_on, best_step=None, best_acceptance_length=0.0)
    return state
