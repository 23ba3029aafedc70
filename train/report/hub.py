"""Pushes an export to the Hugging Face Hub in one commit: the weights, config.json and the model card."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, HfApi, get_token
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, HTTPError, OfflineModeIsEnabled
from huggingface_hub.utils import disable_progress_bars, validate_repo_id

from data.target.checkpoint import is_hub_id
from eagle31.errors import UserError
from eagle31.export.read import check_weights
from eagle31.json_files import read_json
from train.report.card import CARD, model_card, public_name
from train.report.results import read_report

TOKEN = "HF_TOKEN"


def check_repo_id(field: str, name: str) -> None:
    """Raise UserError for what is no OWNER/NAME of the Hub."""
    if "/" not in name:
        raise UserError(field, name, "Give it with its owner: OWNER/NAME.")
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise UserError(field, name, str(error)) from None


def hub_token() -> str:
    """Return the token in HF_TOKEN, or that of `hf auth login`; no log or configuration shows it.

    Raises:
        UserError: there is none.
    """
    token = get_token()
    if token is None:
        remedy = "Log in with `hf auth login`, or set it in the environment, to a token with write access."
        raise UserError(TOKEN, "", remedy)
    return token


def files_to_push(
    output_dir: Path, repo_id: str, *, base_model: str | None = None, license: str | None = None
) -> dict[str, Path | bytes]:
    """Return what a push uploads, by path in the repository: files of the run's export, or their bytes.

    Nothing has a local path: config.json and the card name a target by its last part or `base_model`.

    Raises:
        UserError: the run has no export or no report yet, or the export is damaged.
    """
    export = Path(output_dir) / "export"
    if not (export / "config.json").exists():
        raise UserError("OUTPUT_DIR", output_dir, "It has no export; run its recipe with stages=[export].")
    check_weights(export)
    report = read_report(output_dir)
    run_info = report.run | {"license": license}
    if base_model is not None:
        run_info |= {"target": base_model, "target_embedded": False}
    config = read_json(export / "config.json")
    card = model_card(replace(report, run=run_info), config, repo_id)
    config = _without_paths(config, base_model)
    weights: dict[str, Path | bytes] = {path.name: path for path in sorted(export.glob("*.safetensors*"))}
    return weights | {"config.json": json.dumps(config, indent=2).encode(), CARD: card.encode()}


def _without_paths(config: dict[str, Any], base_model: str | None) -> dict[str, Any]:
    """Return config.json with the target's name instead of its local directory."""
    for part, key in (
        (config.get("eagle31", {}), "target"),
        (config.get("speculators_config", {}).get("verifier", {}), "name_or_path"),
    ):
        if part.get(key) and not is_hub_id(part[key]):
            part[key] = base_model or public_name(part[key])
    return config


def push(files: dict[str, Path | bytes], repo_id: str, message: str, *, private: bool = True) -> str:
    """Upload all files and make one commit of them; the repository never has only some of them.

    A missing repository is created; an existing one keeps its visibility.

    Returns:
        The commit's URL.

    Raises:
        UserError: there is no token or no write access, or the Hub cannot be reached.
    """
    if not sys.stderr.isatty():
        disable_progress_bars()
    api = HfApi(token=hub_token())
    operations = [CommitOperationAdd(name, content) for name, content in files.items()]
    try:
        api.create_repo(repo_id, private=private, exist_ok=True)
        commit = api.create_commit(repo_id, operations, commit_message=message)
    except (HTTPError, OfflineModeIsEnabled, RuntimeError) as error:  # RuntimeError: a file's upload
        status = error.response.status_code if isinstance(error, HfHubHTTPError) else None
        remedy = f"Nothing was committed: {str(error.__cause__ or error).strip().partition(chr(10))[0]}"
        if status in (401, 403):
            remedy = f"The Hub refuses it ({status}): the token has no write access."
        raise UserError("--repo", repo_id, remedy) from None
    return str(commit.commit_url)
