"""Composes a recipe for other commands in the same way as `train/main.py`."""

from collections.abc import Sequence
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import MissingMandatoryValue, OmegaConf

from eagle31.errors import UserError
from train.config.overrides import checked
from train.config.run import RunConfig, check, register

CHECKOUT = Path(__file__).resolve().parents[2]


def recipe_name(arguments: Sequence[str]) -> str:
    """Return the name in `recipe=NAME` among the arguments.

    Raises:
        UserError: the argument is missing.
    """
    names = [one.removeprefix("recipe=") for one in arguments if one.startswith("recipe=")]
    if not names:
        known = sorted(path.stem for path in (CHECKOUT / "recipes" / "recipe").glob("*.yaml"))
        raise UserError("recipe", None, f"Choose one of {', '.join(known)}.")
    return names[-1]


def composed(arguments: Sequence[str]) -> RunConfig:
    """Return the configuration of the run.

    Raises:
        UserError: the recipe or an argument is invalid.
    """
    overrides = checked([*arguments, f"recipe_name={recipe_name(arguments)}"])
    register()
    try:
        with initialize_config_dir(version_base="1.3", config_dir=str(CHECKOUT / "recipes")):
            config: RunConfig = OmegaConf.to_object(compose("train", overrides))  # type: ignore[assignment]
    except MissingMandatoryValue as error:
        key = str(error.full_key)
        raise UserError(key, "???", f"This recipe needs a value for it: {key}=...") from None
    except HydraException as error:
        raise UserError(
            "recipe", recipe_name(arguments), f"{error} {error.__cause__ or ''}".strip()
        ) from None
    check(config)
    return config
