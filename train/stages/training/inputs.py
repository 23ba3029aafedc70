"""What a training depends on: what cannot change when it is continued, its data's order, its validation."""

import json
from dataclasses import asdict
from typing import Any

from data.target.tokenizer import tokenizer_fingerprint
from train.artifact import fingerprint
from train.config.run import Stage
from train.context import RunContext
from train.engines.inputs import target_inputs

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
        "max_grad_norm",
    }
)


def fixed_inputs(context: RunContext) -> dict[str, Any]:
    """Return the settings that cannot change when a training is continued."""
    config = context.config
    drafter = plain(asdict(config.drafter))
    drafter.pop("init_revision")
    if drafter.pop("init_from") is not None:
        drafter["init_from"] = context.drafter.initial_fingerprint
    optim = plain(asdict(config.optim))
    fixed = {
        "target": target_inputs(config.target, context.target.parts.fingerprint),
        "tokenizer": tokenizer_fingerprint(context.target.tokenizer),
        "template": context.target.template_fingerprint,
        "aux_layer_ids": list(context.drafter.aux_layer_ids),
        "drafter": drafter,
        "optim": {name: value for name, value in optim.items() if name not in CHANGEABLE_OPTIM},
        # How DeepSpeed splits the training state changes no result.
        "precision": config.deepspeed.precision.value,
        "seed": context.train_seed,
    }
    return json.loads(json.dumps(fixed))  # as it is read from a file


def plain(values: dict[str, Any]) -> dict[str, Any]:
    """Return settings with the values of enums."""
    return {key: getattr(value, "value", value) for key, value in values.items()}


def order_key(inputs: dict[str, Any]) -> str:
    """Return a fingerprint of what the order of the training rows depends on, apart from the seed."""
    return fingerprint(
        {name: inputs[name] for name in ("capture", "max_samples")}
        | {"row_tokens": inputs["train"]["row_tokens"]}
    )


def validation_key(context: RunContext) -> str:
    """Return a fingerprint of what the acceptance length in validation depends on, apart from the drafter."""
    # Without `max_samples`, because another number of training samples leaves the held-out prompts.
    answers = context.artifacts[Stage.answers].key
    return fingerprint({"answers": answers, "draft_tokens": context.config.evaluate.draft_tokens})
