"""What a training depends on: two of which it is the same have the same result."""

from dataclasses import asdict
from typing import Any

from data.target.tokenizer import tokenizer_fingerprint
from train.artifact import Artifact, named_training
from train.config.run import RunConfig, training_seed
from train.config.training import OptimConfig
from train.drafter.chosen import ChosenDrafter
from train.engines.inputs import target_inputs
from train.trainer.learning_rate import with_rates

CONTINUED = "continued"  # the input of a training that continues another


def fixed_inputs(config: RunConfig, drafter: ChosenDrafter) -> dict[str, Any]:
    """Return the settings that cannot change when a training is continued."""
    target, shape = drafter.target, plain(asdict(drafter.settings))
    for name in ("init_revision", "block_size"):  # the second follows evaluate.draft_tokens
        shape.pop(name)
    if shape.pop("init_from") is not None:
        shape["init_from"] = drafter.initial_fingerprint
    return {
        "target": target_inputs(config.target, target.parts),
        "tokenizer": tokenizer_fingerprint(target.tokenizer),
        "template": target.template_fingerprint,
        "aux_layer_ids": list(drafter.aux_layer_ids),
        "drafter": shape,
        "optimizer": config.optim.name.value,
        # How DeepSpeed splits the training state changes no result.
        "precision": config.deepspeed.precision.value,
        "seed": training_seed(config),
    }


def chosen_optim(config: RunConfig, drafter: ChosenDrafter) -> OptimConfig:
    """Return the settings of the optimizer, with the rule's learning rates where the recipe gives none."""
    return with_rates(config.optim, drafter.config(drafter.target.parts.vocab_size))


def training_inputs(config: RunConfig, drafter: ChosenDrafter, data: Artifact) -> dict[str, Any]:
    """Return what a training depends on, apart from the vocabulary and the states."""
    training = asdict(config.train)
    # These change no weights, or are separate inputs. validate_every stays in: it affects which step is
    # chosen as the best.
    for name in (
        "log_every",
        "rollout_chunk",
        "row_ranks",
        "save_every",
        "keep_checkpoints",
        "continue_from",
        "seed",
    ):
        training.pop(name)
    if config.train.max_steps is not None:
        training.pop("num_epochs")
    continued = {}
    if config.train.continue_from is not None:
        directory, step = named_training(config.train.continue_from)
        continued[CONTINUED] = [str(directory), step]
    return continued | {
        "fixed": fixed_inputs(config, drafter),
        "data": data.key,
        "max_samples": config.data.max_samples,
        "optim": plain(asdict(chosen_optim(config, drafter))),
        "train": plain(training),
        "draft_tokens": config.evaluate.draft_tokens,
    }


def plain(values: dict[str, Any]) -> dict[str, Any]:
    """Return settings with the values of enums."""
    return {key: getattr(value, "value", value) for key, value in values.items()}
