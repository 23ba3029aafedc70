"""The sides of the benchmark: eagle31 with its defaults or other settings, and the peers."""

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from omegaconf import OmegaConf

from eagle31.errors import UserError
from train.bench.peers.environment import PEERS
from train.config.compose import RECIPES

DEFAULTS, ADAMW, PUBLISHED_ADAMW = "eagle31", "eagle31-adamw", "eagle31-adamw-1e-4"


@dataclass(frozen=True)
class Side:
    """A trainer with its settings."""

    name: str
    overrides: tuple[str, ...] = ()  # of eagle31's recipe
    is_peer: bool = False

    @property
    def is_reference(self) -> bool:
        """Whether the others are compared with its end, so that it needs no shorter budgets."""
        return self.is_peer or self.name in (ADAMW, PUBLISHED_ADAMW)


def chosen_sides(names: Sequence[str], further: Sequence[str]) -> list[Side]:
    """Return the sides of --sides and --side.

    Args:
        names: names of `known_sides`.
        further: NAME=OVERRIDES, with any number of overrides of eagle31's recipe.

    Raises:
        UserError: a name is unknown, or there are two sides of one name, or none.
    """
    return chosen("side", known_sides(), names, further, parse_side)


class _Named(Protocol):
    @property
    def name(self) -> str: ...


NamedT = TypeVar("NamedT", bound=_Named)


def chosen(
    what: str,
    known: Mapping[str, NamedT],
    names: Sequence[str],
    further: Sequence[str],
    parse: Callable[[str], NamedT],
) -> list[NamedT]:
    """Return what the two options for trained drafters choose: --sides and --side, if `what` is "side".

    Args:
        names: names of known ones.
        further: texts that `parse` reads.

    Raises:
        UserError: a name is unknown, or there are two of one name, or none.
    """
    for name in names:
        if name not in known:
            raise UserError(f"--{what}s", name, f"Choose from {', '.join(known)}.")
    found = [known[name] for name in names] + [parse(text) for text in further]
    for index, one in enumerate(found):
        if one.name in {other.name for other in found[:index]}:
            raise UserError(f"--{what}", one.name, f"There are two {what}s of this name.")
    if not found:
        raise UserError(f"--{what}s", "", f"Give at least one {what}.")
    return found


def known_sides() -> dict[str, Side]:
    """Return the named sides: eagle31's defaults, its AdamW, the same with EAGLE's rate, and the peers."""
    adamw = adamw_recipe()
    own = [Side(DEFAULTS), Side(ADAMW, adamw), Side(PUBLISHED_ADAMW, (*adamw, "optim.lr=1e-4"))]
    return {side.name: side for side in (*own, *(Side(name, is_peer=True) for name in PEERS))}


def adamw_recipe() -> tuple[str, ...]:
    """Return the overrides for AdamW with EAGLE's settings, which take precedence over those of a recipe.

    The learning rate is that of eagle31's rule, because EAGLE's is for wider drafters.
    """
    settings: Any = OmegaConf.to_container(OmegaConf.load(RECIPES / "optim" / "adamw.yaml"))
    values = {name: str(value).replace(" ", "") for name, value in settings.items()}
    values.setdefault("lr", "null")
    values.setdefault("warmup_fraction", "0.015")  # SpecForge's, which the schema has as its default
    return ("optim=adamw", *(f"optim.{name}={value}" for name, value in values.items()))


def parse_side(text: str) -> Side:
    """Parse NAME=OVERRIDES, such as `linear=optim.schedule=linear train.step_decay=1.0`.

    Raises:
        UserError: it has no name that can be that of a directory, or no override.
    """
    name, overrides = named_overrides("--side", text, example="linear=optim.schedule=linear")
    if name in known_sides():
        raise UserError("--side", text, f"{name} is the name of another side; choose another name.")
    return Side(name, overrides)


def named_overrides(option: str, text: str, *, example: str) -> tuple[str, tuple[str, ...]]:
    """Parse NAME=OVERRIDES, with any number of overrides of the recipe.

    Raises:
        UserError: it has no name that can be that of a directory, or no override.
    """
    name, _, rest = text.partition("=")
    overrides = tuple(shlex.split(rest))
    if not re.fullmatch(r"[\w.+-]+", name) or not overrides or not all("=" in one for one in overrides):
        raise UserError(option, text, f'Give NAME=OVERRIDES, such as "{example}".')
    return name, overrides
