"""Metrics of a run: always in metrics.jsonl, and in Weights & Biases if it is enabled."""

import logging
import math
import netrc
import os
import re
import secrets
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from eagle31.credentials import without_url_credentials
from eagle31.json_files import append_jsonl, expecting, read_json, read_jsonl, write_json, write_jsonl
from train.config.training import TrackingMode

logger = logging.getLogger(__name__)


SECRET_KEY = re.compile(r"(^|_)(token|api_key|secret|password|credentials?)$", re.IGNORECASE)


class Tracker:
    """Appends metrics to metrics.jsonl and sends them to W&B; on ranks other than 0 it does nothing.

    W&B takes no step twice, and none back. So its history gets a step once a checkpoint has it, after which
    no resumed run repeats it. Its summary has each value at once.
    """

    def __init__(self, metrics_path: Path | None, run: Any | None) -> None:
        self._metrics_path = metrics_path
        self._run = run
        self._kept: list[dict[str, Any]] = []  # what no checkpoint has yet

    def log(self, metrics: dict[str, Any]) -> None:
        """Logs one line; `metrics` has `kind`, the prefix of its names in W&B, and `step`."""
        if self._metrics_path is not None:
            append_jsonl(self._metrics_path, metrics)
        if self._run is not None:
            self._kept.append(metrics)
            self._run.summary.update(flatten_metrics(metrics) | {"step": metrics["step"]})

    def commit(self) -> None:
        """Send everything logged so far to W&B's history, after a checkpoint that has it."""
        lines, self._kept = self._kept, []
        if self._run is not None:
            send(self._run, lines)

    def close(self) -> None:
        """Waits until W&B has everything that is committed. Later metrics go to metrics.jsonl only."""
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
    one uninterrupted run. The W&B run id is kept in `directory`; a resumed run continues that W&B run, which
    first gets what it lacks. Where W&B has later steps than the checkpoint, a new W&B run gets all steps.

    Args:
        config: shown by W&B, without values that look like secrets.
        directory: holds W&B's files.
        is_main: True on rank 0; False gives a tracker that does nothing.
    """
    if not is_main:
        return Tracker(None, None)
    lines = read_jsonl(metrics_path) if resume_step and metrics_path.exists() else []
    lines = [line for line in lines if line["step"] <= resume_step]
    write_jsonl(metrics_path, lines)
    if mode is TrackingMode.auto:
        mode = TrackingMode.online if has_wandb_key() else TrackingMode.offline
    if mode is TrackingMode.disabled:
        return Tracker(metrics_path, None)
    directory.mkdir(parents=True, exist_ok=True)
    run, sent = _open_run(mode, project, name, config, directory, resume_step or -1)
    send(run, [line for line in lines if line["step"] > sent])
    return Tracker(metrics_path, run)


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
    if isinstance(value, str) and without_url_credentials(value) != value:
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


def send(run: Any, lines: Iterable[dict[str, Any]]) -> None:
    """Log lines to W&B's history, with one row for each step, in the order of the steps."""
    rows: dict[int, dict[str, float]] = {}
    for line in lines:
        rows.setdefault(line["step"], {}).update(flatten_metrics(line))
    for step, row in sorted(rows.items()):
        run.log(row, step=step, commit=True)


def _open_run(
    mode: TrackingMode, project: str, name: str, config: dict[str, Any], directory: Path, last: int
) -> tuple[Any, int]:
    """Open the W&B run of the directory, or a new one if that has steps after `last`, the checkpoint's.

    Returns:
        The run, and the last step that W&B has of it; -1: none.
    """
    # Imported here because it takes seconds, which other ranks and runs without W&B should not spend.
    from train.tracking.wandb_files import last_step, mend

    mend(directory)
    id_path = directory / "wandb_run.json"
    if id_path.exists():
        with expecting(id_path, "the id of a W&B run"):
            run_id = str(read_json(id_path)["id"])
        # Offline, a file may lack what a killed run has logged last.
        sent: float = -1
        if mode is TrackingMode.offline:
            try:
                sent = last_step(directory, run_id)
            except ValueError as error:
                logger.warning("%s", error)
                sent = math.inf  # it may have any step
        if sent <= last:
            run = _init(mode, project, name, config, directory, run_id)
            if mode is TrackingMode.online and run.resumed:
                sent = run.starting_step - 1
            if sent <= last:
                return run, int(sent)
            run.finish()
        logger.warning("W&B run %s may have steps after the checkpoint; a new W&B run begins", run_id)
    run_id = secrets.token_hex(4)
    write_json(id_path, {"id": run_id})
    return _init(mode, project, name, config, directory, run_id), -1


def _init(
    mode: TrackingMode, project: str, name: str, config: dict[str, Any], directory: Path, run_id: str
) -> Any:
    import wandb

    run = wandb.init(
        project=project,
        name=name,
        id=run_id,
        config=without_secrets(config),
        dir=str(directory),
        mode="online" if mode is TrackingMode.online else "offline",
        resume="allow",
        # W&B's metadata file would hold the command line and any token in it.
        settings=wandb.Settings(console="off", silent=True, disable_code=True, x_disable_meta=True),
    )
    logger.info("W&B run: %s", run.url if mode is TrackingMode.online else f"offline, in {run.dir}")
    return run
