"""A configuration as the arguments with which a recipe composes to it."""

import re
from collections.abc import Iterator
from enum import Enum
from typing import Any

import yaml
from omegaconf import OmegaConf

from train.config.compose import compose_config
from train.config.run import RunConfig

_PLAIN = re.compile(r"[\w./:@%+-]+")
_LEFT_OUT = ("plan.", "recipe_name", "stages")


def overrides_of(config: RunConfig) -> dict[str, str]:
    """Return the values in which a configuration differs from its recipe, as the command line takes them.

    Keys of the plan and `stages` are left out.
    """
    recipe = compose_config([f"recipe={config.recipe_name}"])
    theirs = dict(_leaves(OmegaConf.to_container(recipe, resolve=True, enum_to_str=True)))
    ours = dict(_leaves(OmegaConf.to_container(OmegaConf.structured(config), enum_to_str=True)))
    return {
        key: assigned(value)
        for key, value in ours.items()
        if not key.startswith(_LEFT_OUT) and (key not in theirs or theirs[key] != value)
    }


def assigned(value: Any) -> str:
    """Return a value as Hydra reads it after `key=`."""
    if isinstance(value, Enum):
        return str(value.value)
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, list):
        return f"[{','.join(map(assigned, value))}]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{assigned(key)}:{assigned(one)}" for key, one in value.items()) + "}"
    if not isinstance(value, str):
        return str(value)
    if _PLAIN.fullmatch(value) and isinstance(yaml.safe_load(value), str):
        return value
    escaped = value.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


def _leaves(values: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every value that is not a mapping, by its dotted key; empty mappings say nothing."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + str(key), value
