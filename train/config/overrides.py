"""Command-line keys held against the schema, for a better word than Hydra's when one is mistyped."""

import dataclasses
import difflib
import re
import typing
from collections.abc import Iterable

from eagle31.errors import UserError
from train.config.run import RunConfig

FREE_FORM = (
    "data.template_kwargs",
    "drafter.rope_parameters",
    "target.architecture",
    "vllm.engine_args",
)  # dictionaries whose keys are not ours
_OVERRIDE = re.compile(r"^([A-Za-z_][\w.]*)=")


def schema_keys(schema: type = RunConfig, prefix: str = "") -> set[str]:
    """Every key of a recipe, dotted, the groups themselves included."""
    keys = set()
    for name, kind in typing.get_type_hints(schema).items():
        keys.add(prefix + name)
        if dataclasses.is_dataclass(kind):
            keys |= schema_keys(typing.cast(type, kind), f"{prefix}{name}.")
    return keys


def checked(arguments: Iterable[str]) -> list[str]:
    """The arguments for Hydra, after refusing `key=value` ones whose key no recipe has.

    Raises:
        UserError: names the key and the nearest ones.
    """
    known = schema_keys() | {"recipe"}
    return [_checked(argument, known) for argument in arguments]


def _checked(argument: str, known: set[str]) -> str:
    match = _OVERRIDE.match(argument)
    if match is None or match[1].startswith("hydra."):
        return argument
    key = match[1]
    if any(key == name or key.startswith(f"{name}.") for name in FREE_FORM):
        return f"++{argument}"
    if key in known:
        return argument
    last = key.rsplit(".", 1)[-1]
    near = difflib.get_close_matches(key, known, n=3, cutoff=0.6)
    near += [name for name in sorted(known) if name.rsplit(".", 1)[-1] == last and name not in near]
    hint = f"Did you mean {' or '.join(near)}?" if near else "--cfg job prints the keys there are."
    raise UserError(key, argument[len(key) + 1 :], f"There is no such key. {hint}")
