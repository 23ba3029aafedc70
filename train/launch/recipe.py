"""A recipe composed outside of `train/main.py`, as it composes it."""

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
    """Of `recipe=NAME` among the arguments.

    Raises:
        UserError: it is not there.
    """
    names = [one.removeprefix("recipe=") for one in arguments if one.startswith("recipe=")]
    if not names:
        known = sorted(path.stem for path in (CHECKOUT / "recipes" / "recipe").glob("*.yaml"))
        raise UserError("recipe", None, f"Choose one of {', '.join(known)}.")
    return names[-1]


def composed(arguments: Sequence[str]) -> RunConfig:
    """The run's configuration.

    Raises:
        UserError: the recipe or an argument is not sound.
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
