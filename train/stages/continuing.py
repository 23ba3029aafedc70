"""Continuing a training: what must stay the same, which checkpoint it is, and how its run begins."""

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from safetensors.torch import load_file

from data.target.tokenizer import tokenizer_fingerprint
from data.text.template import template_fingerprint
from eagle31.errors import UserError
from train.config.run import Stage
from train.config.training import AUTO, NONE
from train.context import RunContext
from train.distributed import read_when_set, shared_values
from train.inference.inputs import target_inputs
from train.trainer.continuation import (
    VOCAB,
    EarlierTraining,
    begin,
    check_steps,
    find_earlier,
    parse_origin,
    saved_steps,
)

KEPT = "kept"  # the input of the vocab stage that says which earlier vocabulary it keeps
_EARLIER = "stages/train/earlier"
# Settings of `optim` that may change when a training is continued; optimizer states depend on the others.
CHANGEABLE_OPTIM = frozenset(
    {
        "lr",
        "matrix_lr",
        "schedule",
        "warmup_fraction",
        "warmup_steps",
        "min_lr_fraction",
        "decay_fraction",
        "decay_shape",
        "max_grad_norm",
        "max_norm_jump",
        "max_skipped_steps",
    }
)
_LINKED = (Stage.data, Stage.vocab, Stage.answers, Stage.capture)


def fixed_inputs(context: RunContext) -> dict[str, Any]:
    """Return the settings that cannot change when a training is continued."""
    config = context.config
    drafter = plain(asdict(config.drafter))
    drafter.pop("init_revision")
    if drafter.pop("init_from") is not None:
        drafter["init_from"] = context.initial_fingerprint
    deepspeed = plain(asdict(config.deepspeed))
    deepspeed.pop("timeout_minutes")
    optim = plain(asdict(config.optim))
    fixed = {
        "target": target_inputs(config.target, context.parts.fingerprint),
        "tokenizer": tokenizer_fingerprint(context.tokenizer),
        "template": template_fingerprint(context.tokenizer, context.template_kwargs),
        "aux_layer_ids": list(context.aux_layer_ids),
        "drafter": drafter,
        "optim": {name: value for name, value in optim.items() if name not in CHANGEABLE_OPTIM},
        "deepspeed": deepspeed,
        "seed": context.train_seed,
    }
    return json.loads(json.dumps(fixed))  # as it is read from a file


def plain(values: dict[str, Any]) -> dict[str, Any]:
    """Return settings with the values of enums."""
    return {key: getattr(value, "value", value) for key, value in values.items()}


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


def check_training(context: RunContext, problem: UserError | None) -> None:
    """Decide whether the training continues the earlier one or starts at the first step. Rank 0 calls.

    Args:
        problem: what `share_earlier` returned.

    Raises:
        UserError: the user named an earlier training, or continues it with other data, and it cannot be
            continued with these settings.
    """
    artifact, earlier = context.artifacts[Stage.train], context.earlier
    if saved_steps(artifact.directory):
        return
    automatic = context.config.train.continue_from == AUTO
    try:
        if problem is not None:
            raise problem
        if earlier is not None:
            check_steps(earlier, context.config.train.max_steps, artifact.inputs)
    except UserError as error:
        # A draft vocabulary that was kept for the drafter of the earlier training is not for a new one.
        if not automatic or KEPT in context.artifacts[Stage.vocab].inputs:
            raise
        context.earlier = None
        print(f"train: starts at the first step: {error.remedy}", flush=True)


def begin_training(context: RunContext) -> None:
    """Write what the training depends on, and take over the checkpoint that it continues. Rank 0 calls.

    Raises:
        UserError: the earlier training deleted the checkpoint in the meantime.
    """
    artifact, earlier = context.artifacts[Stage.train], context.earlier
    if begin(artifact.directory, artifact.inputs, earlier):
        assert earlier is not None
        print(f"train: continues {earlier.directory} after step {earlier.step}", flush=True)


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
        if (artifacts / natural_key / "stage.json").exists():
            return None
    d2t = load_file(earlier.directory / VOCAB)["d2t"]
    return hashlib.sha256(d2t.numpy().tobytes()).hexdigest()[:12]
