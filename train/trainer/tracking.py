"""Metrics of a run: always in metrics.jsonl, and in Weights & Biases if it is enabled."""

import logging
import netrc
import os
import re
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from eagle31.json_files import append_jsonl, read_json, read_jsonl, write_json, write_jsonl
from train.config.training import TrackingMode

logger = logging.getLogger(__name__)


SECRET_KEY = re.compile(r"(^|_)(token|api_key|secret|password|credentials?)$", re.IGNORECASE)


SECRET_VALUE = re.compile(r"\b(hf_[A-Za-z0-9]{16,}|https?://[^/\s:@]+:[^/\s@]+@)")


class Tracker:
    """Appends metrics to metrics.jsonl and sends them to W&B; on ranks other than 0 it does nothing."""

    def __init__(self, metrics_path: Path | None, run: Any | None) -> None:
        self._metrics_path = metrics_path
        self._run = run

    def log(self, metrics: dict[str, Any]) -> None:
        """Logs one line; `metrics` has `kind`, the prefix of its names in W&B, and `step`."""
        if self._metrics_path is not None:
            append_jsonl(self._metrics_path, metrics)
        if self._run is not None:
            self._run.log(flatten_metrics(metrics), step=metrics["step"])

    def close(self) -> None:
        """Waits until W&B has everything. Metrics logged later go to metrics.jsonl only."""
        if self._run is not None:
            import wandb

            self._run.finish()
            # finish() returns before W&B's own process has written the end of an offline run.
            wandb.teardown()
            self._run = None


def open_tracker(
    mode: TrackingMode,
    *,
    project: str,
    name: str,
    config: dict[str, Any],
    directory: Path,
    metrics_path: Path,
    resume_step: int,
    is_main: bool,
) -> Tracker:
    """Open the tracker of a run that resumes after `resume_step` (0: starts from the beginning).

    Lines that an interrupted run logged after its last checkpoint are dropped, so that metrics.jsonl reads as
    one uninterrupted run. The W&B run id is kept in `directory`; a resumed run continues that W&B run.

    Args:
        config: shown by W&B, without values that look like secrets.
        directory: holds W&B's files.
        is_main: True on rank 0; False gives a tracker that does nothing.
    """
    if not is_main:
        return Tracker(None, None)
    lines = read_jsonl(metrics_path) if resume_step and metrics_path.exists() else []
    write_jsonl(metrics_path, [line for line in lines if line["step"] <= resume_step])
    if mode is TrackingMode.auto:
        mode = TrackingMode.online if has_wandb_key() else TrackingMode.offline
    if mode is TrackingMode.disabled:
        return Tracker(metrics_path, None)
    return Tracker(metrics_path, _open_wandb(mode, project, name, config, directory, resume_step))


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


def without_secrets(value: Any) -> Any:
    """Return a copy of a nested config without the keys and strings that carry credentials."""
    if isinstance(value, dict):
        return {k: without_secrets(v) for k, v in value.items() if not SECRET_KEY.search(str(k))}
    if isinstance(value, list | tuple):
        return [without_secrets(item) for item in value]
    if isinstance(value, str) and SECRET_VALUE.search(value):
        return "(removed)"
    return value


def _flatten(prefix: str, value: Any) -> Iterator[tuple[str, float]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _flatten(f"{prefix}/{key}", item)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _flatten(f"{prefix}_{index}", item)
    elif isinstance(value, int | float):
        yield prefix, value


def _open_wandb(
    mode: TrackingMode, project: str, name: str, config: dict[str, Any], directory: Path, resume_step: int
) -> Any:
    # Imported here because it takes seconds, which other ranks and runs without W&B should not spend.
    import wandb

    directory.mkdir(parents=True, exist_ok=True)
    id_path = directory / "wandb_run.json"
    if not (resume_step and id_path.exists()):
        write_json(id_path, {"id": secrets.token_hex(4)})
    run = wandb.init(
        project=project,
        name=name,
        id=read_json(id_path)["id"],
        config=without_secrets(config),
        dir=str(directory),
        mode="online" if mode is TrackingMode.online else "offline",
        resume="allow",
        # W&B's metadata file would hold the command line and any token in it.
        settings=wandb.Settings(console="off", silent=True, disable_code=True, x_disable_meta=True),
    )
    logger.info("W&B run: %s", run.url if mode is TrackingMode.online else f"offline, in {run.dir}")
    return run
