import os
import time
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from datasets import Dataset

from eagle31.errors import UserError
from train.artifact import Artifact, remove_leftovers, remove_leftovers_of_results

LEFT = (
    ".plan.json.71.partial",
    "artifacts/train-1/checkpoints/.step-00000008.partial/engine/model.pt",
    "artifacts/train-1/checkpoints/.step-00000002.removed.partial/state.json",
    "artifacts/train-1/checkpoints/best/.tmpVPX8Nr",
    "artifacts/export-1/.checkpoint.partial/.tmpaB3dEf",
    "report/.index.html.71.partial",
)
KEPT = (
    ".lock",
    "artifacts/train-1/checkpoints/step-00000006/state.json",
    "artifacts/train-1/checkpoints/best/drafter-00000006.safetensors",
    # A server may be writing them.
    "artifacts/capture-1/train/.shard-vllm-0-00001.safetensors.partial",
    "artifacts/capture-1/train/.shard-vllm-0-00001.json.71.partial",
    "artifacts/capture-1/train/refused/.5.json.71.partial",
    "notes.partial",
    ".tmp/notes",
)


def test_only_what_a_killed_run_has_left_is_removed(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    output = tmp_path / "run"
    for path in (elsewhere / ".a.partial", *(output / name for name in (*LEFT, *KEPT))):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    (output / "link").symlink_to(elsewhere)
    (output / ".export.partial").symlink_to(elsewhere)
    remove_leftovers(output)
    assert (output / LEFT[1]).exists()
    making = Artifact("export", {}, output / "artifacts" / "export-1")
    with making.locked():  # by another run
        remove_leftovers_of_results(output / "artifacts")
    assert {name for name in LEFT if (output / name).exists()} == {LEFT[4]}
    remove_leftovers_of_results(output / "artifacts")
    for lock in (output / "artifacts").glob(".*.lock"):
        lock.unlink()
    found = {path.relative_to(output).as_posix() for path in output.rglob("*") if path.is_file()}
    assert found == {*KEPT}
    assert not (output / "artifacts/train-1/checkpoints/.step-00000008.partial").exists()
    assert not (output / ".export.partial").is_symlink()
    assert (elsewhere / ".a.partial").exists()


def test_a_run_waits_for_another_that_makes_the_same_result(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    artifact, made, printed = Artifact.locate(tmp_path, "data", {}), [], ""

    def make() -> None:
        with artifact.locked():
            made.append("by another")

    another = Thread(target=make)
    with artifact.locked():
        another.start()
        while f"data: waits for process {os.getpid()} on " not in printed:
            printed += capsys.readouterr().out
        made.append("here")
    another.join()
    assert made == ["here", "by another"]


def test_killed_starts_count_up_to_their_last_file(tmp_path: Path) -> None:
    artifact = Artifact.locate(tmp_path, "train", {})
    assert artifact.begin() == 0
    (artifact.directory / "checkpoints").mkdir()
    for step, (seconds, total) in enumerate(((100, 100), (20, 120))):
        file = artifact.directory / "checkpoints" / str(step)
        file.touch()
        os.utime(file, times=(time.time() + seconds,) * 2)
        assert artifact.begin() == pytest.approx(total, abs=1)
        file.unlink()
    artifact.finish(130, {})
    assert artifact.manifest["seconds"] == 130
    assert [path.name for path in artifact.directory.iterdir() if path.is_file()] == ["stage.json"]


@pytest.mark.parametrize(
    ("name", "content", "read", "removed"),
    [
        ("stage.json", b"[]", lambda artifact: artifact.summary, "stage.json"),
        ("stage.json", b"{}", lambda artifact: artifact.summary, "stage.json"),
        ("started.json", b"{}", Artifact.begin, "started.json"),
        ("evaluation.json", b"[]", lambda artifact: artifact.read("evaluation.json"), "."),
        ("evaluation.json", None, lambda artifact: artifact.read("evaluation.json"), "."),
        ("train/data-00000-of-00001.arrow", b"cut", lambda artifact: artifact.dataset("train"), "."),
        ("train/state.json", b"[]", lambda artifact: artifact.dataset("train"), "."),
    ],
)
def test_a_damaged_file_is_named_with_what_to_delete(
    tmp_path: Path, name: str, content: bytes | None, read: Callable[[Artifact], Any], removed: str
) -> None:
    artifact = Artifact.locate(tmp_path, "data", {})
    Dataset.from_dict({"input_ids": [[1, 2]]}).save_to_disk(artifact.directory / "train")
    if content is not None:
        (artifact.directory / name).write_bytes(content)
    with pytest.raises(UserError, match="It is damaged") as caught:
        read(artifact)
    assert caught.value.value in (artifact.directory / name, (artifact.directory / name).parent)
    assert f"Delete {artifact.directory / removed}: the run's command" in caught.value.remedy
