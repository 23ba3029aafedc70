"""A setting of a run: its default, its meaning, and its bounds, from which both checks and docs are made."""

import copy
import dataclasses
import operator
from collections.abc import Iterator
from math import isfinite
from typing import Any

from eagle31.errors import UserError

# No setting means anything beyond this; a number that large is a slip, and overflows where it is used.
_LARGEST = 10**12
_BOUNDS = {
    "ge": ("at least", operator.ge),
    "gt": ("greater than", operator.gt),
    "le": ("at most", operator.le),
    "lt": ("less than", operator.lt),
}


def setting(default: Any, meaning: str, **bounds: float) -> Any:
    """Return a dataclass field.

    Args:
        default: of the field; a list or a mapping is copied for each instance.
        meaning: what the setting does, for docs/configuration.md.
        bounds: `ge`, `gt`, `le` and `lt` of a number, or of each number of a list.
    """
    metadata = {"meaning": meaning, "bounds": bounds}
    if isinstance(default, list | dict):
        return dataclasses.field(default_factory=lambda: copy.copy(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def bounds_in_words(bounds: dict[str, float]) -> str:
    """Return such as "at least 0 and less than 1"."""
    return " and ".join(f"{_BOUNDS[name][0]} {bound}" for name, bound in bounds.items())


def check_settings(config: Any) -> None:
    """Refuse NaN, infinity, numbers out of their bounds, and empty texts.

    Raises:
        UserError: names the key, the value and what is expected.
    """
    for key, value, field in _settings(config, ""):
        for one in value if isinstance(value, list) else [value]:
            if isinstance(one, str) and not one.strip():
                raise UserError(key, repr(one), "It is empty, perhaps by a shell variable without a value.")
            if isinstance(one, int | float) and not isinstance(one, bool):
                _check_number(key, one, field.metadata["bounds"])


def _settings(config: Any, prefix: str) -> Iterator[tuple[str, Any, dataclasses.Field]]:
    """Yield each setting's dotted key, its value and its field, those of named members included."""
    for field in dataclasses.fields(config):
        key, value = prefix + field.name, getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            yield from _settings(value, f"{key}.")
        elif isinstance(value, dict):
            for name, member in value.items():
                if dataclasses.is_dataclass(member):
                    yield from _settings(member, f"{key}.{name}.")
        else:
            yield key, value, field


def _check_number(key: str, value: float, bounds: dict[str, float]) -> None:
    if not isfinite(value):
        raise UserError(key, value, "Give a finite number.")
    if not all(_BOUNDS[name][1](value, bound) for name, bound in bounds.items()):
        raise UserError(key, value, f"It must be {bounds_in_words(bounds)}.")
    if abs(value) > bounds.get("le", _LARGEST):
        raise UserError(key, value, f"No setting means anything beyond {_LARGEST:,}.")
