"""Composes a run's configuration from its recipe and the overrides on the command line."""

import argparse
import dataclasses
import difflib
import functools
import os
import re
import typing
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra import initialize_config_dir
from hydra.compose import compose
from hydra.errors import HydraException, OverrideParseException
from omegaconf import DictConfig, ListConfig, MissingMandatoryValue, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from eagle31.credentials import HIDDEN, has_token, has_url_credentials, is_secret_name, without_credentials
from eagle31.errors import UserError
from train.config.run import RunConfig, check, register

CHECKOUT = Path(__file__).resolve().parents[2]
RECIPES = CHECKOUT / "recipes"
_HOME = "~/"
_SECRET = "A configuration is written to files; give the secret in an environment variable."
# Mappings whose keys are not ours: groups of settings under names, and arguments for others.
NAMED = ("data.sources",)
FREE_FORM = (
    *NAMED,
    "data.template_kwargs",
    "drafter.rope_parameters",
    "target.architecture",
    "vllm.engine_args",
)


def parse_arguments() -> argparse.Namespace:
    """Parse the command line of `train/main.py`: `overrides`, and `cfg` where it is only printed."""
    parser = argparse.ArgumentParser(
        usage="[torchrun --nproc-per-node N] train/main.py recipe=NAME [key=value ...] [--cfg job] [--help]",
        description="Runs a recipe: trains a drafter, evaluates it, and exports it for vLLM.",
        epilog=_epilog(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="settings that replace the recipe's"
    )
    parser.add_argument("--cfg", choices=["job"], help="print the full configuration and run nothing")
    return parser.parse_intermixed_args()


def compose_config(arguments: Sequence[str]) -> DictConfig:
    """Return the configuration before its values are checked; it has no secrets.

    Raises:
        UserError: the recipe or an argument cannot be used.
    """
    name = recipe_name(arguments)
    register()
    with (
        errors_for_users(name, arguments),
        initialize_config_dir(version_base="1.3", config_dir=str(RECIPES)),
    ):
        config = compose("train", [*for_hydra(arguments), f"recipe_name={name}"])
        _expand_home(config)
        _check_secrets(OmegaConf.to_container(config, resolve=True))
    return config


def _expand_home(config: Any) -> None:
    """Replace `~/` at the beginning of a path by the home directory."""
    for key in config if isinstance(config, DictConfig) else range(len(config)):
        value = None if OmegaConf.is_missing(config, key) else config[key]
        if isinstance(value, DictConfig | ListConfig):
            _expand_home(value)
        elif isinstance(value, str) and value.startswith(_HOME):
            config[key] = os.path.expanduser(value)


def composed(arguments: Sequence[str]) -> RunConfig:
    """Return the run's configuration.

    Raises:
        UserError: the recipe or an argument cannot be used.
    """
    with errors_for_users(recipe_name(arguments), arguments):
        config: RunConfig = OmegaConf.to_object(compose_config(arguments))  # type: ignore[assignment]
    check(config)
    return config


def recipe_name(arguments: Sequence[str]) -> str:
    """Return the name in `recipe=NAME`.

    Raises:
        UserError: it is missing.
    """
    names = [one.removeprefix("recipe=") for one in arguments if one.startswith("recipe=")]
    if not names:
        raise UserError("recipe", "", f"Give recipe=NAME with one of {', '.join(choices('recipe'))}.")
    return names[-1]


def choices(group: str) -> list[str]:
    """Return the names that `group=NAME` can choose; none where `group` has no folder in recipes/."""
    return sorted(path.stem for path in (RECIPES / group).glob("*.yaml"))


def schema_keys(schema: type = RunConfig, prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yield every key of a recipe, dotted, with its type; the groups are keys, too."""
    for name, kind in typing.get_type_hints(schema).items():
        yield prefix + name, kind
        if dataclasses.is_dataclass(kind):
            yield from schema_keys(typing.cast(type, kind), f"{prefix}{name}.")


def for_hydra(arguments: Iterable[str]) -> list[str]:
    """Return the arguments with leave to add keys where they are free; the others must name what exists.

    Raises:
        UserError: names the key, the value, and the nearest keys or values that exist.
    """
    return [_for_hydra(argument) for argument in arguments]


def _for_hydra(argument: str) -> str:
    key, equals, value = argument.lstrip("+").partition("=")
    if argument.startswith("~"):
        if key.removeprefix("~") in FREE_FORM or not _is_free(key.removeprefix("~")):
            remedy = "It has no meaning without a value; only keys within these can be removed: "
            raise UserError("argument", argument, f"{remedy}{', '.join(FREE_FORM)}.")
        return argument
    if not equals:
        raise UserError("argument", argument, "Write it as key=value.")
    if value.startswith(_HOME):  # Hydra's grammar has no such character outside of quotes
        value = f"'{value}'"
        argument = f"{argument.partition('=')[0]}={value}"
    if _is_free(key):
        member = re.fullmatch(rf"({'|'.join(map(re.escape, NAMED))})\.([\w-]+)(?:\.(\w+))?", key)
        if member is None:
            return f"++{key}={value}"
        group, name, setting = member.groups()
        return (
            f"++{group}={{{name}:{value}}}"
            if setting is None
            else f"++{group}={{{name}:{{{setting}:{value}}}}}"
        )
    names = choices(key)
    if names and value not in names:
        nearest = _nearest(value, names) or f"Choose one of {', '.join(names)}."
        raise UserError(key, value, f"There is no such choice. {nearest}")
    known = _known_keys()
    if not names and key not in known:
        same = [one for one in known if one.rsplit(".", 1)[-1] == key.rsplit(".", 1)[-1]]
        remedy = _nearest(key, list(known), same) or "--cfg job prints the keys that exist."
        raise UserError(key, value, f"There is no such key. {remedy}")
    if "list[" in str(known.get(key)) and value[:1] not in ("[", "$", "'", '"') and value != "null":
        raise UserError(key, value, f"It is a list; write it as {key}=[{value}].")
    return argument.lstrip("+")  # it exists


def _is_free(key: str) -> bool:
    """Return whether a key, dotted, is or belongs to a mapping whose keys are not ours."""
    return any(key == name or key.startswith(f"{name}.") for name in FREE_FORM)


@functools.cache
def _known_keys() -> dict[str, object]:
    return dict(sorted(schema_keys()))


def _nearest(value: str, names: Sequence[str], others: Sequence[str] = ()) -> str:
    near = dict.fromkeys([*difflib.get_close_matches(value, names, cutoff=0.5), *others])
    return f"Did you mean {' or '.join(near)}?" if near else ""


@contextmanager
def errors_for_users(recipe: str, arguments: Sequence[str]) -> Iterator[None]:
    """Turns what Hydra and OmegaConf find wrong in a recipe or an argument into a UserError."""
    try:
        yield
    except UserError:
        raise
    except MissingMandatoryValue as error:
        raise UserError(str(error.full_key), "", f"Give {error.full_key}=VALUE.") from None
    except OverrideParseException as error:
        # Hydra's reason repeats a part of the value, which may be a part of a secret.
        key, _, value = error.override.lstrip("+").partition("=")
        remedy = "It cannot be parsed. Put a value that has special characters into quotes: \"key='...'\"."
        raise UserError(key, value, remedy) from None
    except (HydraException, OmegaConfBaseException) as error:
        cause = error.__cause__ or error
        message = str(cause).splitlines()[0].strip().rstrip(".")
        key = str(getattr(cause, "full_key", None) or "")
        # The one that Hydra names, and else the last with the key, which replaces earlier ones.
        reason = str(error)
        named = [argument for argument in arguments if reason.endswith(argument)]
        for argument in [*named, *reversed(arguments)]:
            given, _, value = argument.lstrip("+~").partition("=")
            if given == key or key.startswith(f"{given}.") or argument in reason or f"'{given}'" in reason:
                if without_credentials(value) != value:
                    message = "It cannot be used"  # Hydra's reason repeats the value, with its secret
                raise UserError(given, value, f"{message}.") from None
        raise UserError("recipe", recipe, f"{key} {message}.".strip()) from None
    except (YAMLError, OSError, ValueError, TypeError, AttributeError, AssertionError) as error:
        # Hydra does not check that a file has keys.
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError("recipe", recipe, f"A file in recipes/ cannot be read: {reason}.") from error


def _check_secrets(value: object, field: str = "") -> None:
    """Refuse secrets: the configuration is written to the output directory and sent to W&B.

    The messages have the field and not the secret.
    """
    if isinstance(value, dict):
        for key, item in value.items():
            _check_secrets(str(key), field)
            name = f"{field}.{key}".lstrip(".")
            if isinstance(item, str) and item and is_secret_name(str(key)):
                raise UserError(name, HIDDEN, _SECRET)
            _check_secrets(item, name)
    elif isinstance(value, list):
        for item in value:
            _check_secrets(item, field)
    elif isinstance(value, str) and has_token(value):
        raise UserError(field, HIDDEN, _SECRET)
    elif isinstance(value, str) and has_url_credentials(value):
        remedy = (
            "A configuration is written to files, so its URLs have no credentials: a server's key belongs in "
            "VLLM_API_KEY, and those of object storage in the variables or files of its own client."
        )
        raise UserError(field, value, remedy)


def _epilog() -> str:
    names = choices("recipe")
    width = max(map(len, names))
    lines = [f"  {name:{width}}  {_first_comment(name)}" for name in names]
    keys = "docs/configuration.md explains every key; --cfg job prints the full configuration of a recipe."
    return "\n".join(["recipes:", *lines, "", keys])


def _first_comment(recipe: str) -> str:
    """Return what a recipe's file says about it."""
    lines = (RECIPES / "recipe" / f"{recipe}.yaml").read_text().splitlines()
    comments = [line.removeprefix("#").strip() for line in lines if line.startswith("# ")]
    return next((line for line in comments if not line.startswith("@")), "")
