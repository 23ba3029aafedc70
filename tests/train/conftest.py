"""A small trained target and runs on it, each made once in a session."""

import shutil
from pathlib import Path

import pytest

from data.embedded.corpus import standard_library
from data.embedded.target import EmbeddedTarget, TargetSettings, ensure_embedded_target
from data.embedded.training import TrainingSettings
from tests.shared import TRAINING_CODE, make_cached, make_once
from tests.train.small_run import MAIN, RECIPE, TEXT_STAGES, arguments
from tests.train.torchrun import run_here, torchrun

SETTINGS = TargetSettings(
    vocab_size=512,
    hidden_size=64,
    num_layers=4,
    num_heads=2,
    num_kv_heads=1,
    intermediate_size=128,
    max_positions=512,
    training=TrainingSettings(steps=80, batch_tokens=1024, max_document_tokens=256),
)


@pytest.fixture(scope="session")
def small_target(tmp_path_factory: pytest.TempPathFactory) -> EmbeddedTarget:
    """The small target with its tokenizer and conversations; all workers share it."""

    def make(directory: Path) -> None:
        cached = make_cached("small_target", [*TRAINING_CODE, Path(__file__)], build)
        shutil.copytree(cached, directory, dirs_exist_ok=True)

    def build(directory: Path) -> None:
        ensure_target(directory)

    return ensure_target(make_once(tmp_path_factory, "small_target", make))


def ensure_target(directory: Path) -> EmbeddedTarget:
    source = standard_library() / "email"
    return ensure_embedded_target(directory, source=source, settings=SETTINGS, progress=False)


@pytest.fixture(scope="session")
def captured(small_target: EmbeddedTarget, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An output directory in which everything before training is done; all workers share it."""

    def make(directory: Path) -> None:
        run_here(RECIPE, *arguments(small_target, directory / "run"), TEXT_STAGES)

    return make_once(tmp_path_factory, "captured", make) / "run"


@pytest.fixture(scope="session")
def finished(
    small_target: EmbeddedTarget, captured: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, str]:
    """The output directory of a full run and what the run printed.

    The session's workers run it once, and each has a copy.
    """

    def make(directory: Path) -> None:
        shutil.copytree(captured, directory / "run")
        printed = torchrun(MAIN, f"recipe={RECIPE}", *arguments(small_target, directory / "run"))
        (directory / "printed").write_text(printed)

    shared = make_once(tmp_path_factory, "finished", make)
    directory = tmp_path_factory.mktemp("finished") / "run"
    shutil.copytree(shared / "run", directory, symlinks=True)
    return directory, (shared / "printed").read_text()
