"""Runs whose hidden states go through a real Mooncake store."""

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import psutil
import pytest

from data.embedded.target import EmbeddedTarget
from data.transport.mooncake import MooncakeTransport
from data.vllm.environment import check_mooncake
from eagle31.errors import UserError
from tests.data.transport.mooncake_master import Master, free_ports, running_master
from tests.processes import command_of
from tests.train.small_run import MAIN, RECIPE, arguments, metrics_of, start, wait_for_step
from tests.train.torchrun import run_here, torchrun

STEPS = 6


@pytest.fixture(scope="module")
def master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Master]:
    with running_master(tmp_path_factory.mktemp("mooncake")) as one:
        yield one


@pytest.fixture(scope="module")
def with_answers(small_target: EmbeddedTarget, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("answers") / "run"
    run_here(RECIPE, *arguments(small_target, directory), "stages=[data,vocab,answers]")
    return directory


@pytest.fixture(scope="module")
def through_spool(
    small_target: EmbeddedTarget, with_answers: Path, tmp_path_factory: pytest.TempPathFactory
) -> list[float]:
    """The losses of a run with one rank and a spool."""
    directory = tmp_path_factory.mktemp("spool") / "run"
    shutil.copytree(with_answers, directory)
    torchrun(MAIN, f"recipe={RECIPE}", *arguments(small_target, directory), *online())
    return losses_of(directory)


def online() -> list[str]:
    # With one sample per batch, its states do not depend on other samples.
    settings = [
        "capture.mode=online",
        "capture.batch_tokens=1",
        "capture.spool_gb=0.01",
        f"train.max_steps={STEPS}",
    ]
    return [*settings, "train.validate_every=3", "train.save_every=6", "stages=[capture,train]"]


def through(address: str) -> list[str]:
    settings = ["capture.transport=mooncake", f"capture.mooncake.master={address}"]
    return [*online(), *settings, "capture.mooncake.segment_gb=0.02"]


def losses_of(directory: Path) -> list[float]:
    return [record["loss"] for record in metrics_of(directory) if record["kind"] == "train"]


@contextmanager
def left_empty(master: Master) -> Iterator[None]:
    """Check that nothing is left in the store; this process contributes memory that outlives the ranks."""
    memory = MooncakeTransport(master.settings(64 << 20), num_aux_layers=1, hidden_size=1)
    with closing(memory):
        yield
        assert memory._store.remove_all(force=True) == 0


def test_two_ranks_train_through_the_store_and_leave_it_empty(
    small_target: EmbeddedTarget,
    with_answers: Path,
    master: Master,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    directory = tmp_path / "run"
    shutil.copytree(with_answers, directory)
    command = [*arguments(small_target, directory), *through(master.address)]
    with left_empty(master):
        torchrun(MAIN, f"recipe={RECIPE}", *command, num_processes=2)
    losses = losses_of(directory)
    assert len(losses) == STEPS
    assert losses[-1] < losses[0]
    if request.config.getoption("--full"):
        assert losses == pytest.approx(request.getfixturevalue("through_spool"), rel=1e-5)


@pytest.mark.full("it starts vLLM twice")
def test_training_survives_a_killed_vllm_engine(
    small_target: EmbeddedTarget,
    with_answers: Path,
    through_spool: list[float],
    master: Master,
    vllm_python: Path,
    tmp_path: Path,
) -> None:
    check_mooncake(vllm_python)
    directory = tmp_path / "run"
    shutil.copytree(with_answers, directory)
    with left_empty(master):
        process = start(small_target, directory, *through(master.address), "capture.source=vllm")
        wait_for_step(directory, 1)
        engine_of(process).kill()
        assert process.wait(timeout=240) == 0
    assert losses_of(directory) == pytest.approx(through_spool, rel=1e-3)
    restarts = [record["producer_restarts"] for record in metrics_of(directory) if record["kind"] == "train"]
    assert sum(restarts) == 1


def engine_of(process: subprocess.Popen) -> psutil.Process:
    """Return the engine of the vLLM server that the run started."""
    children = psutil.Process(process.pid).children(recursive=True)
    [engine] = [one for one in children if "".join(command_of(one)[:1]).startswith("VLLM::Engine")]
    return engine


def test_a_missing_master_is_reported_before_any_stage(small_target: EmbeddedTarget, tmp_path: Path) -> None:
    (port,) = free_ports(1)
    command = [*arguments(small_target, tmp_path), *through(f"127.0.0.1:{port}")]
    with pytest.raises(UserError, match=rf"127\.0\.0\.1:{port}: No master answers at this address"):
        run_here(RECIPE, *command, "stages=[data,vocab,answers,capture,train]")
    assert not list(tmp_path.glob("artifacts/*"))
