"""Pushes an export to the Hugging Face Hub: weights, model card and plots in one commit."""

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, HfApi
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, HTTPError, OfflineModeIsEnabled
from huggingface_hub.utils import disable_progress_bars, validate_repo_id

from data.target.checkpoint import is_hub_id
from eagle31.errors import UserError
from eagle31.json_files import read_json
from train.artifact import Artifact
from train.config.export import HubConfig
from train.reporting.model_card import model_card, public_name
from train.reporting.results import at_draft_length, read_report, read_serving

TOKEN = "HF_TOKEN"


PLOTS = ("summary.png", "acceptance_by_position.png")


CARD = "README.md"


@dataclass(frozen=True)
class Upload:
    """The files of one push by path in the repository; each is a file of the run or the card's bytes."""

    files: dict[str, Path | bytes]

    @property
    def num_bytes(self) -> int:
        return sum(size for _, size in self.sizes())

    def sizes(self) -> Iterator[tuple[str, int]]:
        for name, content in sorted(self.files.items()):
            yield name, len(content) if isinstance(content, bytes) else content.stat().st_size

    def commit_operations(self) -> list[CommitOperationAdd]:
        return [CommitOperationAdd(name, content) for name, content in sorted(self.files.items())]


def check_push(hub: HubConfig, needs_token: bool = True) -> None:
    """Refuse a push that could not succeed.

    Raises:
        UserError: the repository has no name or an invalid one, or there is no token.
    """
    if hub.repo_id is None:
        raise UserError("hub.repo_id", None, "Give the repository to push to: OWNER/NAME.")
    for field, name in (("hub.repo_id", hub.repo_id), ("hub.base_model", hub.base_model)):
        if name is None:
            continue
        if "/" not in name:
            raise UserError(field, name, "Give it with its owner: OWNER/NAME.")
        try:
            validate_repo_id(name)
        except HFValidationError as error:
            raise UserError(field, name, str(error)) from None
    if needs_token:
        hub_token()


def hub_token() -> str:
    """Return the token from the environment, the only place that no log or configuration shows.

    Raises:
        UserError: it is not set.
    """
    token = os.environ.get(TOKEN, "").strip()
    if not token:
        remedy = "Set it in the environment to a token with write access; it is not read from anywhere else."
        raise UserError(TOKEN, None, remedy)
    return token


def prepare_upload(output_dir: Path, hub: HubConfig) -> Upload:
    """Collect a run's export, its plots, and a card with the results and the serve command.

    Raises:
        UserError: the run has no export or no report yet, or its export was changed since it was written.
    """
    output_dir = Path(output_dir)
    check_directory(output_dir)
    export, report = output_dir / "export", output_dir / "report"
    for path, stage in ((export / "config.json", "export"), (report / "metrics.json", "report")):
        if not path.exists():
            raise UserError("OUTPUT_DIR", output_dir, f"Has no {path.name}: run the stage '{stage}' first.")
    check_export(export)
    files: dict[str, Path | bytes] = {
        path.relative_to(export).as_posix(): path for path in sorted(export.rglob("*")) if path.is_file()
    }
    plots = {f"plots/{name}": report / name for name in PLOTS if (report / name).exists()}
    files |= plots
    files[CARD] = card(output_dir, hub, list(plots)).encode()
    return Upload(files)


def check_directory(output_dir: Path) -> None:
    """Raise UserError if there is no such directory."""
    if not output_dir.is_dir():
        raise UserError("OUTPUT_DIR", output_dir, "No such directory; give the output directory of a run.")


def check_export(export: Path) -> None:
    """Compare an export with what the run wrote, so that no damaged one is uploaded.

    Raises:
        UserError: a file is missing or was altered.
    """
    artifact = Artifact("export", {}, export.resolve().parent)
    try:
        damage = artifact.damage()
    except FileNotFoundError:  # a copy, or an export that is being written
        damage = None
    if damage is not None:
        raise UserError("export", export, f"{damage}; run the recipe again, which exports again.")


def card(output_dir: Path, hub: HubConfig, plots: list[str]) -> str:
    """Return the export's card for the Hub."""
    known = read_report(output_dir)
    run_info: dict[str, Any] = known["run"] | {"hub_id": hub.repo_id, "license": hub.license}
    if hub.base_model is not None:
        run_info |= {"target": hub.base_model, "target_embedded": False}
    config = read_json(output_dir / "export" / "config.json")
    return model_card(run_info, known["evaluation"], config, read_serving(output_dir), plots)


def local_names(output_dir: Path) -> list[str]:
    """Return the local paths in config.json, which is uploaded unchanged."""
    config = read_json(Path(output_dir) / "export" / "config.json")
    names = {config.get("eagle31", {}).get("target")}
    names.add(config.get("speculators_config", {}).get("verifier", {}).get("name_or_path"))
    return sorted(name for name in names if name and not is_hub_id(name) and public_name(name) != name)


def commit_message(output_dir: Path) -> str:
    """Return the commit message, which has the acceptance length."""
    evaluation = read_report(output_dir)["evaluation"]
    stats = at_draft_length(evaluation["trained"], evaluation["k"])
    return f"Acceptance length {stats['acceptance_length']:.2f} at k = {stats['k']}, temperature 0"


def push_run(output_dir: Path, hub: HubConfig) -> str:
    """Push a run's export and report; return the commit's URL."""
    return push(prepare_upload(output_dir, hub), hub, commit_message(output_dir))


def push(upload: Upload, hub: HubConfig, message: str) -> str:
    """Upload all files and make one commit of them; the repository never has only some of them.

    A missing repository is created; an existing one keeps its visibility.

    Returns:
        The commit's URL.

    Raises:
        UserError: there is no token or no write access, or the Hub cannot be reached.
    """
    assert hub.repo_id is not None
    if not sys.stderr.isatty():
        disable_progress_bars()
    api = HfApi(token=hub_token())
    try:
        api.create_repo(hub.repo_id, private=hub.private, exist_ok=True)
        commit = api.create_commit(hub.repo_id, upload.commit_operations(), commit_message=message)
    except (HTTPError, OfflineModeIsEnabled, RuntimeError) as error:  # RuntimeError: a file's upload
        raise UserError("hub.repo_id", hub.repo_id, _reason(error)) from None
    return str(commit.commit_url)


def _reason(error: BaseException) -> str:
    status = error.response.status_code if isinstance(error, HfHubHTTPError) else None
    if status in (401, 403):
        return f"The Hub refuses it ({status}): the token in {TOKEN} has no write access."
    causes = (error, error.__cause__) if isinstance(error, RuntimeError) else (error,)
    lines = [str(one).strip().partition("\n")[0] or type(one).__name__ for one in causes if one is not None]
    return f"Nothing was committed: {' '.join(lines)}"
