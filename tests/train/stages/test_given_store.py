"""Runs that read a store which another run has captured, from a directory or a URL."""

import shutil
from pathlib import Path

import fsspec
import pytest

from data.embedded.target import EmbeddedTarget
from eagle31.errors import UserError
from eagle31.json_files import read_json
from tests.train.small_run import RECIPE, arguments, metrics_of
from tests.train.torchrun import run_here


def _store_of(directory: Path) -> Path:
    [store] = directory.glob("artifacts/capture-*/train")
    return store


def _with_texts(finished: Path, directory: Path) -> Path:
    """Return a run's directory that has the results of the stages before capture only."""
    shutil.copytree(finished, directory, symlinks=True, ignore=shutil.ignore_patterns("capture-*", "train-*"))
    return directory


def test_a_run_reads_the_store_of_another_at_a_url(
    small_target: EmbeddedTarget,
    finished: tuple[Path, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("EAGLE31_CACHE", str(tmp_path / "descriptions"))
    directory = _with_texts(finished[0], tmp_path / "run")
    url = f"memory://{tmp_path.name}/store"
    fsspec.filesystem("memory").put(f"{_store_of(finished[0])}/", url, recursive=True)
    command = [
        *arguments(small_target, directory),
        "stages=[data,vocab,answers,capture,train]",
        "train.max_steps=1",
        f"capture.store={url}",
    ]
    run_here(RECIPE, *command)
    [captured] = directory.glob("artifacts/capture-*")
    # Only the held-out states are captured here.
    assert not (captured / "train").exists()
    expected = read_json(_store_of(finished[0]).parent / "stage.json")["summary"]
    found = read_json(captured / "stage.json")["summary"]
    assert {name: found[name] for name in ("num_samples", "num_tokens")} == {
        name: expected[name] for name in ("num_samples", "num_tokens")
    }
    first, *_ = [one for one in metrics_of(directory) if one["kind"] == "train"]
    again, *_ = [one for one in metrics_of(finished[0]) if one["kind"] == "train"]
    assert (first["loss"], first["grad_norm"]) == (again["loss"], again["grad_norm"])
    fsspec.filesystem("memory").rm(url, recursive=True)
    with pytest.raises(UserError, match=rf"capture\.store={url}: "):
        run_here(RECIPE, *command)


@pytest.mark.parametrize(
    ("changes", "remedy"),
    [
        (["capture.codec=fp8"], r"Its codec is .*exact.* change capture\.codec"),
        (["data.max_samples=10"], r"samples of other data than this run's 10; "),
        (["capture.store=/nowhere"], "it is no finished store"),
    ],
)
def test_a_store_of_another_target_or_other_data_is_refused(
    small_target: EmbeddedTarget,
    finished: tuple[Path, str],
    tmp_path: Path,
    changes: list[str],
    remedy: str,
) -> None:
    directory = _with_texts(finished[0], tmp_path / "run")
    given = [f"capture.store={_store_of(finished[0])}", *changes]
    command = [*arguments(small_target, directory), "stages=[data,vocab,answers,capture]", *given]
    with pytest.raises(UserError, match=remedy) as caught:
        run_here(RECIPE, *command)
    assert caught.value.field == "capture.store"
    assert not list(directory.glob("artifacts/capture-*/train"))
