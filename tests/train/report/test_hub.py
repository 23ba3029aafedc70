"""Pushes by the command: what is uploaded, and what must not be."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from huggingface_hub import CommitOperationAdd, HfApi
from huggingface_hub.errors import HfHubHTTPError

from eagle31.json_files import read_json, write_json
from tests.runs.here import run_command
from tests.train.drafter.tiny_export import save_target_with_tokenizer, write_tiny_export
from tests.train.report.finished_run import evaluation, run_info

REPO, TOKEN = "someone/drafter", "hf_ThisIsAToken"
URL = f"https://huggingface.co/{REPO}/commit/1"
Push = Callable[..., tuple[int, str, str]]


@dataclass
class Hub:
    """What the client was asked to do."""

    private: dict[str, bool] = field(default_factory=dict)
    commits: list[tuple[str, dict[str, bytes]]] = field(default_factory=list)
    refusal: int | None = None


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Hub:
    """Replace the two calls of the Hub's client that a push makes."""
    asked = Hub()

    def create_repo(api: HfApi, repo: str, *, private: bool, exist_ok: bool) -> None:
        assert api.token == TOKEN
        assert exist_ok
        asked.private[repo] = private

    def create_commit(_: HfApi, repo: str, operations: list[CommitOperationAdd], **kwargs: Any) -> Any:
        if asked.refusal is not None:
            answer = httpx.Response(asked.refusal, request=httpx.Request("POST", URL))
            raise HfHubHTTPError("refused", response=answer)
        files = {}
        for one in operations:
            with one.as_file() as file:
                files[one.path_in_repo] = file.read()
        asked.commits.append((kwargs["commit_message"], files))
        return SimpleNamespace(commit_url=URL)

    monkeypatch.setattr(HfApi, "create_repo", create_repo)
    monkeypatch.setattr(HfApi, "create_commit", create_commit)
    return asked


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    """Return the output directory of a run with the files that a push reads, and some that stay."""
    write_tiny_export(tmp_path / "export", save_target_with_tokenizer(tmp_path / "target"))
    config = read_json(tmp_path / "export" / "config.json")
    config["eagle31"]["target"] = str(tmp_path / "target")
    write_json(tmp_path / "export" / "config.json", config)
    known = {
        "evaluation": evaluation(),
        "run": run_info() | {"target": str(tmp_path / "target")},
        "metrics": [],
    }
    write_json(tmp_path / "report" / "metrics.json", known)
    return tmp_path


@pytest.fixture
def push(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> Push:
    """Return a function that runs `scripts/push_to_hub`."""

    def run(*arguments: object, token: str | None = TOKEN) -> tuple[int, str, str]:
        monkeypatch.delenv("HF_TOKEN", raising=False)
        if token is not None:
            monkeypatch.setenv("HF_TOKEN", token)
        done = run_command("scripts/push_to_hub", *arguments)
        return done.status, done.out, done.err

    return run


def test_weights_config_and_card_are_one_private_commit_without_a_local_path(
    hub: Hub, push: Push, finished: Path
) -> None:
    (finished / "export" / "prompts.json").write_text("a prompt of the user")
    status, printed, said = push(finished, "--repo", REPO, "--license", "apache-2.0")
    assert status == 0, said
    assert URL in printed
    assert hub.private == {REPO: True}
    [(message, files)] = hub.commits
    assert files.keys() == {"model.safetensors", "config.json", "README.md"}
    assert files["model.safetensors"] == (finished / "export" / "model.safetensors").read_bytes()
    assert "2.53" in message
    card = files["README.md"].decode()
    assert "license: apache-2.0" in card
    assert f'"model": "{REPO}"' in card
    for content in (*files.values(), printed.encode(), said.encode()):
        assert str(finished).encode() not in content
        assert TOKEN.encode() not in content


def test_base_model_names_the_target_in_the_card_and_in_config_json(
    hub: Hub, push: Push, finished: Path
) -> None:
    push(finished, "--repo", REPO, "--public", "--base-model", "someone/small-llama")
    assert hub.private == {REPO: False}
    [(_, files)] = hub.commits
    assert b"base_model: someone/small-llama" in files["README.md"]
    assert b'"target": "someone/small-llama"' in files["config.json"]


def test_dry_run_shows_what_would_be_uploaded(hub: Hub, push: Push, finished: Path) -> None:
    status, printed, _ = push(finished, "--repo", REPO, "--dry-run", token=None)
    assert status == 0
    assert all(shown in printed for shown in ("model.safetensors", "config.json", "private", "## Serve"))
    assert not hub.private


@pytest.mark.parametrize(
    ("arguments", "token", "field"),
    [
        (("--repo", REPO), None, "HF_TOKEN"),
        (("--repo", "drafter"), TOKEN, "--repo=drafter"),
        (("--repo", REPO, "--base-model", "here"), TOKEN, "--base-model=here"),
    ],
)
def test_pushes_that_cannot_succeed_are_refused(
    hub: Hub, push: Push, finished: Path, arguments: tuple[str, ...], token: str | None, field: str
) -> None:
    status, _, said = push(finished, *arguments, token=token)
    assert status == 2
    assert f"error: {field}" in said
    assert not hub.commits


@pytest.mark.parametrize("damage", [lambda content: content[:5000], lambda content: content[:-1] + b"!"])
def test_a_damaged_export_is_not_pushed(
    hub: Hub, push: Push, finished: Path, damage: Callable[[bytes], bytes]
) -> None:
    weights = finished / "export" / "model.safetensors"
    weights.write_bytes(damage(weights.read_bytes()))
    for arguments in ((), ("--dry-run",)):
        status, _, said = push(finished, "--repo", REPO, *arguments)
        assert status == 2
        assert f"error: file={weights}: It is missing, or not as the export was written" in said
    assert not hub.commits


def test_a_run_with_warnings_is_pushed_by_force_and_its_card_has_them(
    hub: Hub, push: Push, finished: Path
) -> None:
    known = read_json(finished / "report" / "metrics.json")
    known["evaluation"]["decoding"]["replay"]["num_different"] = 1
    write_json(finished / "report" / "metrics.json", known)
    status, _, said = push(finished, "--repo", REPO)
    assert (status, hub.commits) == (2, [])
    assert "cannot be trusted" in said
    assert push(finished, "--repo", REPO, "--force")[0] == 0
    assert b"> **Warning.** Decoding drafted other tokens" in hub.commits[0][1]["README.md"]


@pytest.mark.parametrize(("refusal", "remedy"), [(403, "no write access"), (500, "Nothing was committed")])
def test_a_refusal_of_the_hub_is_the_users_to_mend(
    hub: Hub, push: Push, finished: Path, refusal: int, remedy: str
) -> None:
    hub.refusal = refusal
    status, _, said = push(finished, "--repo", REPO)
    assert status == 2
    assert f"error: --repo={REPO}" in said
    assert remedy in said
    assert TOKEN not in said
