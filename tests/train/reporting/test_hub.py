"""Pushes with the real client to a local server: what is in the repository, and what must not be."""

import runpy
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from huggingface_hub import constants

from eagle31.json_files import read_json, write_json
from tests.train.drafter.tiny_export import save_target_with_tokenizer, write_tiny_export
from tests.train.reporting.finished_run import evaluation, run_info
from tests.train.reporting.hub_server import TOKEN, Hub, running_hub
from tests.train.torchrun import ROOT

REPO = "someone/drafter"


@pytest.fixture
def hub() -> Iterator[Hub]:
    with running_hub() as running:
        yield running


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the output directory of a run with the files that a push reads."""
    directory = tmp_path_factory.mktemp("run")
    write_tiny_export(directory / "export", save_target_with_tokenizer(directory / "target"))
    (directory / "report").mkdir()
    known = {"evaluation": evaluation(), "run": run_info() | {"target": "Qwen/Qwen3-8B"}, "metrics": []}
    write_json(directory / "report" / "metrics.json", known)
    (directory / "report" / "summary.png").write_bytes(b"\x89PNG" + bytes(9000))
    return directory


Push = Callable[..., "Done"]


@dataclass(frozen=True)
class Done:
    status: int
    stdout: str
    stderr: str


@pytest.fixture
def push(hub: Hub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Push:
    """Return a function that runs `scripts/push_to_hub` against the local server."""
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)  # a different protocol from the Hub's API
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", "/nonexistent")

    def run(*arguments: object, token: str | None = TOKEN) -> Done:
        monkeypatch.setattr(sys, "argv", ["push_to_hub", *map(str, arguments)])
        monkeypatch.delenv("HF_TOKEN", raising=False)
        if token is not None:
            monkeypatch.setenv("HF_TOKEN", token)
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(ROOT / "scripts" / "push_to_hub"), run_name="__main__")
        assert isinstance(ended.value.code, int)
        return Done(ended.value.code, *capsys.readouterr())

    return run


def test_everything_is_uploaded_in_one_private_commit(hub: Hub, push: Push, finished: Path) -> None:
    done = push(finished, "--repo", REPO, "--license", "apache-2.0")
    assert done.status == 0, done.stderr
    assert hub.private == {REPO: True}
    [(message, files)] = hub.commits[REPO]
    export = finished / "export"
    written = {path.relative_to(export).as_posix(): path for path in export.rglob("*") if path.is_file()}
    assert files.keys() == written.keys() | {"README.md", "plots/summary.png"}
    for name, path in written.items():
        assert name == "README.md" or files[name] == path.read_bytes()
    assert "2.53" in message
    card = files["README.md"].decode()
    assert "base_model: Qwen/Qwen3-8B" in card
    assert "license: apache-2.0" in card
    assert f'vllm serve Qwen/Qwen3-8B --speculative-config \'{{"model": "{REPO}"' in card
    assert "![summary](plots/summary.png)" in card
    assert f"{hub.url}/{REPO}/commit/" in done.stdout
    for text in (done.stdout, done.stderr, *(content.decode("latin-1") for content in files.values())):
        assert TOKEN not in text


def test_unchanged_files_are_not_committed_again(hub: Hub, push: Push, finished: Path) -> None:
    for _ in range(2):
        assert push(finished, "--repo", REPO, "--public").status == 0
    assert len(hub.commits[REPO]) == 1
    assert hub.private == {REPO: False}
    assert push(finished, "--repo", REPO, "--license", "mit").status == 0
    assert len(hub.commits[REPO]) == 2


def test_failed_upload_commits_nothing(hub: Hub, push: Push, finished: Path) -> None:
    hub.refuses_objects = True
    done = push(finished, "--repo", REPO)
    assert done.status == 2
    assert done.stderr.startswith(f"error: hub.repo_id={REPO}")
    assert "Traceback" not in done.stderr
    assert not hub.commits


def test_dry_run_sends_no_request(hub: Hub, push: Push, finished: Path) -> None:
    done = push(finished, "--repo", REPO, "--dry-run", token=None)
    assert done.status == 0, done.stderr
    for name in ("model.safetensors", "config.json", "plots/summary.png", "private", "## Serve"):
        assert name in done.stdout
    assert not hub.requests


def test_base_model_replaces_the_embedded_target(push: Push, finished: Path, tmp_path: Path) -> None:
    directory = tmp_path / "run"
    shutil.copytree(finished, directory)
    known = read_json(directory / "report" / "metrics.json")
    known["run"] |= {"target": "/cache/embedded-3f2a91/model", "target_embedded": True}
    write_json(directory / "report" / "metrics.json", known)
    done = push(directory, "--repo", REPO, "--base-model", "someone/small-llama", "--dry-run", token=None)
    assert "drafter for someone/small-llama" in done.stdout
    assert "embedded target" not in done.stdout


@pytest.mark.parametrize(
    ("arguments", "token", "message"),
    [
        (("--repo", REPO), None, "HF_TOKEN"),
        (("--repo", REPO), "hf_AnotherToken", "no write access"),
        (("--repo", "drafter"), TOKEN, "OWNER/NAME"),
        (("--repo", "someone/dra fter"), TOKEN, "hub.repo_id=someone/dra fter"),
        (("--repo", REPO, "--base-model", "here"), TOKEN, "hub.base_model=here"),
    ],
)
def test_pushes_that_cannot_succeed_are_refused(
    hub: Hub,
    push: Push,
    finished: Path,
    arguments: tuple[str, ...],
    token: str | None,
    message: str,
) -> None:
    done = push(finished, *arguments, token=token)
    assert done.status == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert "hf_" not in done.stderr
    assert not hub.commits


def test_run_without_an_export_is_refused(push: Push, tmp_path: Path) -> None:
    done = push(tmp_path, "--repo", REPO)
    assert "run the stage 'export' first" in done.stderr


def test_unreachable_hub_is_reported(
    hub: Hub, push: Push, finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    done = push(finished, "--repo", REPO)
    assert done.status == 2
    assert "Nothing was committed" in done.stderr
