"""Keys and tokens: whether they are there. None is ever printed."""

import os
from collections.abc import Mapping

from train.config.export import HubConfig
from train.doctor.check import Check, asked, judged, ok
from train.reporting.hub import TOKEN, check_push

_SET, _MISSING = "set", "not set"


def hub_check(hub: HubConfig, pushes: bool) -> Check:
    """Return whether there is a token of the Hugging Face Hub, and whether a push could begin.

    Args:
        pushes: whether the run ends with a push.
    """
    if not pushes:
        found = _SET if os.environ.get(TOKEN, "").strip() else _MISSING
        return ok(TOKEN, found, "only for gated and private models")
    return asked(TOKEN, lambda: check_push(hub), _SET, "for the push")


def tracking_check(mode: str) -> Check:
    """Return where W&B keeps the metrics."""
    return ok("W&B", mode, "nothing; with WANDB_API_KEY it gets the metrics")


def server_key_check(environment: Mapping[str, str], variable: str, remote: bool) -> Check | None:
    """Return whether there is a key for servers on other machines; None where there are none."""
    if not remote:
        return None
    there = bool(environment.get(variable))
    remedy = f"Servers on other machines demand a key: export {variable}=... as where they were started."
    return judged(variable, there, _SET if there else _MISSING, "the servers' key", remedy, field=variable)
