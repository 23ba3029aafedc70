"""Metrics of a run: always in metrics.jsonl, and in Weights & Biases where it has a key.

W&B's own variables say where they go: WANDB_PROJECT, WANDB_NAME, and WANDB_MODE (offline, disabled).
"""

import logging
import netrc
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from eagle31.json_files import append_jsonl, expecting, read_json, read_jsonl, write_json, write_jsonl

logger = logging.getLogger(__name__)


class Tracker:
    """Appends metrics to metrics.jsonl and sends them to W&B; on ranks other than 0 it does nothing."""

    def __init__(self, metrics_path: Path | None, run: Any | None) -> None:
        self._metrics_path = metrics_path
        self._run = run

    def log(self, metrics: dict[str, Any]) -> None:
        """Log one line; `metrics` has `kind`, the prefix of its names in W&B, and `step`."""
        if self._metrics_path is not None:
            append_jsonl(self._metrics_path, metrics)
        if self._run is not None:
            self._run.log(flatten_metrics(metrics) | {"step": metrics["step"]})

    def close(self) -> None:
        """Wait until W&B has everything."""
        if self._run is not None:
            import wandb

            self._run.finish()
            # finish() returns before W&B's own process has written the end of an offline run.
            wandb.teardown()
            self._run = None


def open_tracker(
    *, name: str, config: dict[str, Any], directory: Path, resume_step: int, is_main: bool
) -> Tracker:
    """Open the tracker of a run that resumes after `resume_step` (0: starts from the beginning).

    Lines that a killed run logged after its last checkpoint are dropped from metrics.jsonl, so that it reads
    as one uninterrupted run. W&B may get the steps that are repeated a second time, with the same values.

    Args:
        name: of the W&B run, without WANDB_NAME.
        config: shown by W&B. It has no secrets: composing it has refused them.
        directory: gets metrics.jsonl, the id of the W&B run, and W&B's files.
        is_main: True on rank 0; False gives a tracker that does nothing.
    """
    if not is_main:
        return Tracker(None, None)
    metrics_path = directory / "metrics.jsonl"
    lines = read_jsonl(metrics_path) if resume_step and metrics_path.exists() else []
    write_jsonl(metrics_path, [line for line in lines if line["step"] <= resume_step])
    mode = wandb_mode()
    run = None if mode == "disabled" else _open_run(mode, name, config, directory)
    return Tracker(metrics_path, run)


def wandb_mode() -> str:
    """Return `online` if W&B has a key, or else `disabled`, unless WANDB_MODE says otherwise."""
    return os.environ.get("WANDB_MODE") or ("online" if has_wandb_key() else "disabled")


def has_wandb_key() -> bool:
    """Return whether W&B can log in: with WANDB_API_KEY, or with its server's entry in the netrc file."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname
    path = Path(os.environ.get("NETRC", "~/.netrc")).expanduser()
    return host is not None and path.is_file() and netrc.netrc(path).authenticators(host) is not None


def flatten_metrics(metrics: dict[str, Any]) -> dict[str, float]:
    """Return the numbers of one line by their W&B names.

    `{"kind": "train", "step": 1, "depth": [{"loss": 2.0}]}` gives `{"train/depth_0/loss": 2.0}`.
    """
    fields = {key: value for key, value in metrics.items() if key not in ("kind", "step")}
    return dict(_flatten(metrics["kind"], fields))


def _flatten(prefix: str, value: Any) -> Iterator[tuple[str, float]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _flatten(f"{prefix}/{key}", item)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _flatten(f"{prefix}_{index}", item)
    elif isinstance(value, int | float):
        yield prefix, value


def _open_run(mode: str, name: str, config: dict[str, Any], directory: Path) -> Any:
    import wandb  # takes seconds, which other ranks and runs without W&B should not spend

    id_path = directory / "wandb_run.json"
    if not id_path.exists():
        directory.mkdir(parents=True, exist_ok=True)
        write_json(id_path, {"id": secrets.token_hex(4)})
    with expecting(id_path, "the id of a W&B run"):
        run_id = str(read_json(id_path)["id"])
    run = wandb.init(
        project=os.environ.get("WANDB_PROJECT", "eagle31"),
        name=os.environ.get("WANDB_NAME", name),
        id=run_id,
        config=config,
        dir=str(directory),
        mode=mode,  # type: ignore[arg-type]
        resume="allow",
        # W&B's metadata file would hold the command line and any token in it.
        settings=wandb.Settings(console="off", silent=True, disable_code=True, x_disable_meta=True),
    )
    # W&B's own steps never go back, as those of a resumed run do.
    run.define_metric("step", hidden=True)
    run.define_metric("*", step_metric="step")
    logger.info("W&B run: %s", run.url if mode == "online" else f"{mode}, in {run.dir}")
    return run
