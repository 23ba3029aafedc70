"""Composes a run's configuration from its recipe and the overrides on the command line."""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from hydra import initialize_config_dir
from hydra.compose import compose
from hydra.errors import HydraException
from omegaconf import DictConfig, MissingMandatoryValue, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from data.text.choices import check_split
from eagle31.credentials import HIDDEN, has_url_credentials, is_secret_name
from eagle31.errors import UserError
from train.config.overrides import RECIPES, checked, choices
from train.config.run import RunConfig, check, register

CHECKOUT = RECIPES.parent


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
    overrides = checked([*arguments, f"recipe_name={name}"])
    register()
    with (
        _errors_for_users(name, arguments),
        initialize_config_dir(version_base="1.3", config_dir=str(RECIPES)),
    ):
        config = compose("train", overrides)
    check_secrets(OmegaConf.to_container(config))
    return config


def check_secrets(value: object, field: str = "") -> None:
    """Raise UserError for a URL with credentials, and for a secret in a dictionary whose keys are not ours.

    A configuration is written to the output directory and sent to W&B. The message has the field and not the
    secret.
    """
    if isinstance(value, dict):
        for key, item in value.items():
            name = f"{field}.{key}".lstrip(".")
            if isinstance(item, str) and item and is_secret_name(str(key)):
                remedy = "A configuration is written to files; give the secret in an environment variable."
                raise UserError(name, HIDDEN, remedy)
            check_secrets(item, name)
    elif isinstance(value, list | tuple):
        for item in value:
            check_secrets(item, field)
    elif isinstance(value, str) and has_url_credentials(value):
        remedy = (
            "A configuration is written to files, so its URLs have no credentials: a server's key belongs in "
            "VLLM_API_KEY, and those of object storage in the variables or files of its own client."
        )
        raise UserError(field, value, remedy)


def composed(arguments: Sequence[str]) -> RunConfig:
    """Return the run's configuration.

    Raises:
        UserError: the recipe or an argument cannot be used.
    """
    with _errors_for_users(recipe_name(arguments), arguments):
        config: RunConfig = OmegaConf.to_object(compose_config(arguments))  # type: ignore[assignment]
    check(config)
    _check_splits(arguments, config)
    return config


def _check_splits(arguments: Sequence[str], config: RunConfig) -> None:
    """Refuse a split or a subset on the command line that has no effect; a recipe's may be for other data."""
    chosen = dict(argument.lstrip("+").split("=", 1) for argument in arguments if "=" in argument)
    data = config.data
    settings = [(key, "data.train", data.train) for key in ("data.split", "data.subset")]
    settings.append(("data.eval_split", "data.eval", data.eval))
    groups: dict[str, Mapping[str, Any]] = {
        "data.sources": data.sources,
        "data.evaluation_sets": data.evaluation_sets,
    }
    for group, members in groups.items():
        for name, one in members.items():
            key = f"{group}.{name}"
            settings += [(f"{key}.{part}", f"{key}.source", one.source) for part in ("split", "subset")]
    for key, field, source in settings:
        if source is not None and chosen.get(key, "null") not in ("null", "train", "test"):
            check_split(key, chosen[key], field, source)


def recipe_name(arguments: Sequence[str]) -> str:
    """Return the name in `recipe=NAME`.

    Raises:
        UserError: it is missing.
    """
    names = [one.removeprefix("recipe=") for one in arguments if one.startswith("recipe=")]
    if not names:
        raise UserError("recipe", "", f"Give recipe=NAME with one of {', '.join(choices('recipe'))}.")
    return names[-1]


@contextmanager
def _errors_for_users(recipe: str, arguments: Sequence[str]) -> Iterator[None]:
    """Turns what Hydra and OmegaConf find wrong in a recipe into a UserError."""
    try:
        yield
    except MissingMandatoryValue as error:
        key = str(error.full_key)
        raise UserError(key, "???", f"This recipe needs a value for it: {key}=...") from None
    except UserError:
        raise
    except (HydraException, OmegaConfBaseException) as error:
        lines = f"{error}\n{error.__cause__ or ''}".splitlines()
        message = " ".join(line.strip() for line in lines if line.strip() and "object_type" not in line)
        key = str(getattr(error.__cause__ or error, "full_key", None) or "")
        for argument in arguments:
            given, _, value = argument.lstrip("+").partition("=")
            if given == key or key.startswith(f"{given}."):
                raise UserError(given, value, message) from None
        raise UserError("recipe", recipe, message) from None
    except (YAMLError, OSError, ValueError, TypeError, AttributeError, AssertionError) as error:
        # Hydra does not check that a file has keys.
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError("recipe", recipe, f"A file in recipes/ cannot be read: {reason}.") from error


def _epilog() -> str:
    names = choices("recipe")
    width = max(map(len, names))
    lines = [f"  {name:{width}}  {_first_comment(name)}" for name in names]
    return "\n".join(
        [
            "recipes:",
            *lines,
            "",
            "docs/configuration.md explains every key; --cfg job prints the full configuration of a recipe.",
        ]
    )


def _first_comment(recipe: str) -> str:
    """Return what a recipe's file says about it."""
    lines = (RECIPES / "recipe" / f"{recipe}.yaml").read_text().splitlines()
    comments = [line.removeprefix("#").strip() for line in lines if line.startswith("# ")]
    return next((line for line in comments if not line.startswith("@")), "")
