"""Metrics of a run: always in metrics.jsonl, and in Weights & Biases where it has a key.

W&B's own variables say where they go: WANDB_PROJECT, WANDB_NAME, and WANDB_MODE (offline, disabled).
"""

import logging
import netrc
import os
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

from eagle31.errors import UserError
from eagle31.json_files import append_jsonl, expecting, read_json, read_jsonl, write_json, write_jsonl

logger = logging.getLogger(__name__)
FINISH_SECONDS = 60.0  # that W&B may send after the last step; what is left is on disk
_REMEDY = "Correct it, or set WANDB_MODE=disabled to do without W&B."


class Tracker:
    """Appends metrics to metrics.jsonl and sends them to W&B; on ranks other than 0 it does nothing.

    Its `with` block ends the run in W&B, as crashed where the block raises. An error of W&B ends no training.
    """

    def __init__(self, metrics_path: Path | None, run: Any | None) -> None:
        self._metrics_path = metrics_path
        self._run = run

    def __enter__(self) -> "Tracker":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._send(lambda run: _finish(run, exit_code=int(kind is not None)))
        self._run = None

    def log(self, metrics: dict[str, Any]) -> None:
        """Log one line; `metrics` has `kind`, the prefix of its names in W&B, and `step`."""
        if self._metrics_path is not None:
            append_jsonl(self._metrics_path, metrics)
        self._send(lambda run: run.log(flatten_metrics(metrics) | {"step": metrics["step"]}))

    def _send(self, action: Callable[[Any], None]) -> None:
        if self._run is not None:
            try:
                action(self._run)
            except Exception as error:  # its client raises many kinds
                print(f"train: W&B gets nothing more, metrics.jsonl has it all: {error!r}", flush=True)
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


def check_wandb() -> None:
    """Check what W&B reads from the environment; its server is not asked.

    Raises:
        UserError: W&B refuses a variable, or has no key for its server.
    """
    mode = wandb_mode()
    if mode == "disabled":
        return
    import wandb  # takes seconds, which other ranks and runs without W&B should not spend

    for name in sorted(name for name in os.environ if name.startswith("WANDB_")):
        try:
            wandb.Settings().update_from_env_vars({name: os.environ[name]})
        except (ValueError, wandb.Error) as error:
            reason = error.errors()[0]["msg"] if hasattr(error, "errors") else str(error)
            raise UserError(name, os.environ[name], f"W&B refuses it: {reason}. {_REMEDY}") from None
    if mode == "online" and not has_wandb_key():
        remedy = "There is no key: set WANDB_API_KEY, or run `wandb login`, or set another mode."
        raise UserError("WANDB_MODE", mode, remedy)


def wandb_mode() -> str:
    """Return `online` if W&B has a key, or else `disabled`, unless WANDB_MODE says otherwise."""
    return os.environ.get("WANDB_MODE") or ("online" if has_wandb_key() else "disabled")


def has_wandb_key() -> bool:
    """Return whether W&B can log in: by its variables, or with its server's entry in the netrc file.

    Raises:
        UserError: the netrc file cannot be read.
    """
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname
    path = Path(os.environ.get("NETRC", "~/.netrc")).expanduser()
    try:
        return host is not None and path.is_file() and netrc.netrc(path).authenticators(host) is not None
    except (netrc.NetrcParseError, OSError, UnicodeDecodeError) as error:
        raise UserError("NETRC", path, f"W&B reads its key there, and {error}. {_REMEDY}") from None


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
    import wandb

    id_path = directory / "wandb_run.json"
    if not id_path.exists():
        directory.mkdir(parents=True, exist_ok=True)
        write_json(id_path, {"id": secrets.token_hex(4)})
    with expecting(id_path, "the id of a W&B run"):
        run_id = str(read_json(id_path)["id"])

    def start(mode: str) -> Any:
        return wandb.init(
            project=os.environ.get("WANDB_PROJECT", "eagle31"),
            name=os.environ.get("WANDB_NAME", name),
            id=run_id,
            config=config,
            dir=str(directory),
            mode=mode,  # type: ignore[arg-type]
            resume="allow",
            # W&B's metadata file would hold the command line and any token in it.
            settings=wandb.Settings(
                console="off",
                silent=True,
                disable_code=True,
                x_disable_meta=True,
                finish_timeout=float(os.environ.get("WANDB_FINISH_TIMEOUT", FINISH_SECONDS)),
                finish_timeout_raises=True,
            ),
        )

    try:
        run = start(mode)
    except wandb.Error as error:  # its server does not answer, or refuses the key
        wandb.teardown()  # its own process still has a run of this id
        run = start("offline")
        reason = str(error).partition("\n")[0]
        print(f"train: W&B is offline ({reason}); later: wandb sync {Path(run.dir).parent}", flush=True)
    # W&B's own steps never go back, as those of a resumed run do.
    run.define_metric("step", hidden=True)
    run.define_metric("*", step_metric="step")
    logger.info("W&B run: %s", run.dir if run.offline else run.url)
    return run


def _finish(run: Any, exit_code: int) -> None:
    """Wait until W&B has everything, or raise TimeoutError after `FINISH_SECONDS`."""
    import wandb

    try:
        run.finish(exit_code)
    finally:
        # finish() returns before W&B's own process has written the end of an offline run.
        wandb.teardown()
