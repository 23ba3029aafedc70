"""Files of a finished run that were damaged: the same command makes them again, or names them."""

import contextlib
import hashlib
import io
import json
import os
import shutil
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from data.embedded.target import EmbeddedTarget
from eagle31.errors import UserError
from eagle31.json_files import read_json
from tests.bad_input.faults import DAMAGES
from tests.train.small_run import RECIPE, arguments
from tests.train.torchrun import composed, run_here
from train.config.run import Stage, needed_stages, selected_stages
from train.context import RunContext
from train.distributed import World
from train.pipeline import unfinished_stages

# A file of each stage, and one way to damage it for each.
FILES = {
    "data-*/stage.json": "cut",
    "data-*/train/data-*.arrow": "flipped",
    "vocab-*/vocab.safetensors": "missing",
    "answers-*/stage.json": "missing",
    "capture-*/train/manifest.json": "empty",
    "capture-*/validation/index.npy": "cut",
    "train-*/stage.json": "junk",
    "export-*/checkpoint/model.safetensors": "flipped",
    "evaluate-*/evaluation.json": "missing",
}
# What a training leaves cannot be made again without training.
KEPT = {
    "metrics": ("metrics.jsonl", False),
    "best": ("checkpoints/best/best.json", True),
    "best_drafter": ("checkpoints/best/drafter-*.safetensors", True),
    "vocab": ("vocab.safetensors", True),
}


@dataclass
class FinishedRun:
    """A finished run whose files tests damage, and its settings."""

    directory: Path
    context: RunContext

    def file(self, pattern: str) -> Path:
        [path] = self.directory.glob(f"artifacts/{pattern}")
        return path

    def unfinished(self) -> tuple[list[Stage], str]:
        """Return the stages that the same command would run, and what it says on stderr."""
        context = replace(self.context, artifacts={}, reused=set(), earlier=None, continued=None)
        context.__dict__["target"] = self.context.target
        stderr = io.StringIO()
        with contextlib.redirect_stderr(stderr):
            found = unfinished_stages(context, needed_stages(context.config))
        return found, stderr.getvalue()


@pytest.fixture(scope="module")
def run(
    small_target: EmbeddedTarget, finished: tuple[Path, str], tmp_path_factory: pytest.TempPathFactory
) -> FinishedRun:
    directory = tmp_path_factory.mktemp("damaged") / "run"
    shutil.copytree(finished[0], directory, symlinks=True)
    config = composed(RECIPE, *arguments(small_target, directory))
    config = replace(config, stages=selected_stages(config))
    return FinishedRun(directory, RunContext(config, World(rank=0, local_rank=0, size=1)))


@contextlib.contextmanager
def damaged(path: Path, how: str) -> Iterator[None]:
    """Damage a file, and restore it with the manifest of its stage."""
    artifact = next(one for one in path.parents if one.parent.name == "artifacts")
    kept = {one: one.read_bytes() for one in (path, artifact / "stage.json")}
    DAMAGES[how](path)
    try:
        yield
    finally:
        if path.is_dir():
            path.rmdir()
        for one, content in kept.items():
            one.write_bytes(content)


def test_what_is_whole_is_reused(run: FinishedRun) -> None:
    assert run.unfinished() == ([], "")


@pytest.mark.parametrize(("pattern", "how"), FILES.items())
def test_a_damaged_result_is_made_again(run: FinishedRun, pattern: str, how: str) -> None:
    path, stage = run.file(pattern), Stage(pattern.partition("-")[0])
    with damaged(path, how):
        found, said = run.unfinished()
        assert found == [stage]
        if path.name == "stage.json" and how == "missing":
            assert said == ""
        else:
            assert said.startswith(f"{stage.value}: made again, because {path} ")


def test_a_manifest_with_another_number_is_altered_though_it_is_json(
    run: FinishedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = run.file("data-*/stage.json")

    def change(path: Path) -> None:
        content = read_json(path)
        content["facts"]["num_samples"] += 1
        path.write_text(json.dumps(content))

    monkeypatch.setitem(DAMAGES, "another number", change)
    with damaged(path, "another number"):
        assert run.unfinished()[0] == [Stage.data]


def test_a_directory_in_the_place_of_a_file_is_named(run: FinishedRun) -> None:
    path = run.file("vocab-*/vocab.safetensors")
    with damaged(path, "directory"), pytest.raises(UserError) as caught:
        run.unfinished()
    assert (caught.value.field, caught.value.value) == ("file", path)


@pytest.mark.parametrize(
    ("name", "how"),
    [("metrics", "missing"), ("best", "flipped"), ("best_drafter", "missing"), ("vocab", "flipped")],
)
def test_a_training_is_not_repeated_without_a_word_from_the_user(
    run: FinishedRun, name: str, how: str
) -> None:
    pattern, for_export = KEPT[name]
    path = run.file(f"train-*/{pattern}")
    exported = run.file("export-*/stage.json")
    whole = exported.read_bytes()
    with damaged(path, how):
        if for_export:
            assert run.unfinished() == ([], "")  # the export has the weights
            exported.unlink()
        try:
            with pytest.raises(UserError) as caught:
                run.unfinished()
        finally:
            exported.write_bytes(whole)
    assert caught.value.field == "train"
    assert caught.value.value == run.file("train-*/stage.json").parent
    assert str(path) in caught.value.remedy
    assert "delete this directory to train again" in caught.value.remedy


def test_results_that_are_made_again_are_the_same(
    small_target: EmbeddedTarget, finished: tuple[Path, str], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    directory = tmp_path / "run"
    shutil.copytree(finished[0], directory, symlinks=True)

    def contents() -> dict[Path, str]:
        # Times, a random name, the numbers of processes.
        changing = ("stage.json", "state.json", "evaluation.json", "README.md", ".writer-rank-0.lock")
        files = [path for path in directory.glob("artifacts/*/**/*") if path.is_file()]
        kept = [path for path in files if path.name not in changing and "passes" not in path.parts]
        return {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in kept}

    def trained() -> dict:
        [path] = directory.glob("artifacts/evaluate-*/evaluation.json")
        return read_json(path)["trained"]

    before, acceptance = contents(), trained()
    for stage, pattern, how in (
        (Stage.data, "train/data-*.arrow", "cut"),
        (Stage.vocab, "vocab.safetensors", "missing"),
        (Stage.answers, "validation/data-*.arrow", "junk"),
        (Stage.capture, "train/index.npy", "flipped"),
        (Stage.capture, "validation/manifest.json", "cut"),
        (Stage.train, "stage.json", "cut"),
        (Stage.export, "checkpoint/model.safetensors", "missing"),
        (Stage.evaluate, "evaluation.json", "empty"),
    ):
        [path] = directory.glob(f"artifacts/{stage.value}-*/{pattern}")
        DAMAGES[how](path)
    for path in directory.glob("artifacts/evaluate-*/passes/*.json"):
        DAMAGES["flipped"](path)
    begun = time.time()
    run_here(RECIPE, *arguments(small_target, directory))
    printed = capsys.readouterr().out
    for stage in (Stage.data, Stage.vocab, Stage.answers, Stage.capture, Stage.train, Stage.export):
        assert f"{stage.value}: done" in printed
    assert contents() == before
    assert trained() == acceptance
    written = [path for path in directory.rglob("*") if path.is_file() and path.stat().st_mtime > begun]
    names = {path.name for path in written}
    assert names >= {"model.safetensors", "vocab.safetensors", "evaluation.json"}
    assert names >= {"stage.json", "index.npy", "index.html", "summary.png", "config.yaml"}


def test_what_a_run_writes_follows_the_umask(finished: tuple[Path, str]) -> None:
    umask = os.umask(0)
    os.umask(umask)
    others = {
        path: oct(_mode(path))
        for path in finished[0].rglob("*")
        if not path.is_symlink() and _mode(path) != (0o777 if path.is_dir() else 0o666) & ~umask
    }
    assert others == {}


def _mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_directory_is_not_replaced_by_the_link_to_the_export(
    small_target: EmbeddedTarget, tmp_path: Path
) -> None:
    place = tmp_path / "run" / "export"
    place.mkdir(parents=True)
    with pytest.raises(UserError, match=r"run/export: It is not the link .* move it elsewhere"):
        run_here(RECIPE, *arguments(small_target, tmp_path / "run"))
    assert not (tmp_path / "run" / "artifacts").exists()
