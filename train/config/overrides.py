"""Checks command-line overrides against the schema, for clearer messages than Hydra's."""

import dataclasses
import difflib
import functools
import re
import types
import typing
from collections.abc import Iterable, Sequence
from enum import Enum
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from eagle31.credentials import is_secret_name, without_credentials
from eagle31.errors import UserError
from train.config.capture import CaptureMode
from train.config.run import RunConfig

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
NAMED = ("data.evaluation_sets", "data.sources")  # groups whose members have names
FREE_FORM = (
    "data.template_kwargs",
    "drafter.rope_parameters",
    *NAMED,
    "target.architecture",
    "vllm.engine_args",
)  # dictionaries whose keys are not ours
_NAMES = {int: "a whole number", float: "a number", bool: "true or false", str: "a string"}


def schema_keys() -> set[str]:
    """Return every key of a recipe, dotted; the groups are keys, too."""
    return set(schema_types())


def schema_types(schema: type = RunConfig, prefix: str = "") -> dict[str, object]:
    """Return the type of every key."""
    keys: dict[str, object] = {}
    for name, kind in typing.get_type_hints(schema).items():
        keys[prefix + name] = kind
        if dataclasses.is_dataclass(kind):
            keys |= schema_types(typing.cast(type, kind), f"{prefix}{name}.")
    return keys


def choices(group: str) -> list[str]:
    """Return the names that `group=NAME` can choose; none where `group` has no folder in recipes/."""
    return sorted(path.stem for path in (RECIPES / group).glob("*.yaml"))


def checked(arguments: Iterable[str]) -> list[str]:
    """Return the arguments for Hydra, after refusing those that no recipe can take.

    Raises:
        UserError: names the key, the value, and the nearest keys or values that exist.
    """
    known = schema_types() | {"recipe": str}
    return [_of_member(_checked(argument, known)) for argument in arguments]


def _of_member(argument: str) -> str:
    """Return an argument for an evaluation set or a source so that Hydra adds the member, too."""
    key, _, text = argument.lstrip("+").partition("=")
    found = re.fullmatch(rf"({'|'.join(map(re.escape, NAMED))})\.([\w-]+)(?:\.(\w+))?", key)
    if found is None:
        return argument
    group, name, setting = found.groups()
    return f"++{group}={{{name}:{text}}}" if setting is None else f"++{group}={{{name}:{{{setting}:{text}}}}}"


def _checked(argument: str, known: dict[str, object]) -> str:
    override = _parsed(argument)
    key, _, text = argument.partition("=")
    if argument[0] == "~":
        return argument
    key = key.lstrip("+")
    if any(key == name or key.startswith(f"{name}.") for name in FREE_FORM):
        return f"++{argument.lstrip('+')}"
    if key not in known:
        raise UserError(key, text, f"There is no such key. {_nearest_keys(key, known)}")
    if override.is_sweep_override():
        raise UserError(
            key, text, "Give one value. A list is written [1,2], and a string with a comma '1,2'."
        )
    value = override.value()
    names = choices(key)
    if names and isinstance(value, str):
        if value not in names:
            raise UserError(key, text, f"There is no such choice. {_nearest_choice(key, value, names)}")
    else:
        _check_type(key, text, value, known[key])
    return argument


def _parsed(argument: str) -> Override:
    """Parse an override in Hydra's syntax."""
    key, equals, text = argument.partition("=")
    if not equals and not argument.startswith("~"):
        raise UserError("argument", argument, "Write it as key=value.")
    try:
        return OverridesParser.create().parse_override(argument)
    except HydraException as error:
        # Hydra's reason repeats a part of the value, which may be a part of a secret.
        secret = is_secret_name(key.lstrip("+")) or without_credentials(text) != text
        reason = "It cannot be parsed" if secret else str(error).splitlines()[0].strip()
        remedy = f"{reason}. Put a value that has special characters into quotes: \"{key}='...'\"."
        raise UserError(key, text, remedy) from None


def _check_type(key: str, text: str, value: object, kind: object) -> None:
    try:
        OmegaConf.update(_scratch(), key, value)
    except OmegaConfBaseException as error:
        remedy = _expected(kind, value) or f"{str(error).splitlines()[0]}."
        raise UserError(key, text, remedy) from None


@functools.cache
def _scratch() -> DictConfig:
    """Return the configuration that values are tried on: its types stay, whatever its values become."""
    return OmegaConf.structured(RunConfig)


def _expected(kind: object, value: object) -> str | None:
    """Say what a key of this type takes, with the nearest of an enumeration's names."""
    members = [one for one in typing.get_args(kind) if one is not type(None)]
    if isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union:
        inner = _expected(members[0], value) if len(members) == 1 else None
        return inner and f"{inner.removesuffix('.')}, or null."
    if typing.get_origin(kind) is list:
        [member] = members
        if isinstance(member, type) and issubclass(member, Enum):
            return (
                f"Give a list of {', '.join(member.__members__)}, such as [{next(iter(member.__members__))}]."
            )
        return f"Give a list, each entry {_NAMES[member]}." if member in _NAMES else None
    if isinstance(kind, type) and issubclass(kind, Enum):
        return _nearest(str(value), list(kind.__members__))
    if kind in _NAMES:
        return f"Give {_NAMES[kind]}."
    if dataclasses.is_dataclass(kind):
        return "It is a group of keys; set one of them."
    return None


def _nearest_choice(group: str, value: str, names: Sequence[str]) -> str:
    if group == "capture" and value in CaptureMode.__members__:
        chosen = [name for name in names if name.endswith("_online") == (value == CaptureMode.online.value)]
        return f"Choose the source too: {', '.join(chosen)}. capture.mode={value} keeps the recipe's source."
    return _nearest(value, names)


def _nearest(value: str, names: Sequence[str]) -> str:
    near = difflib.get_close_matches(value, names, n=3, cutoff=0.5)
    return f"Did you mean {' or '.join(near)}?" if near else f"Choose one of {', '.join(names)}."


def _nearest_keys(key: str, known: Iterable[str]) -> str:
    last = key.rsplit(".", 1)[-1]
    near = difflib.get_close_matches(key, known, n=3, cutoff=0.6)
    near += [name for name in sorted(known) if name.rsplit(".", 1)[-1] == last and name not in near]
    return f"Did you mean {' or '.join(near)}?" if near else "--cfg job prints the keys that exist."
