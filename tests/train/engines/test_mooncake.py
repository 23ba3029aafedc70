"""Runs whose hidden states go through a real Mooncake store."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from data.capture.vllm.environment import check_mooncake
from data.embedded.target import EmbeddedTarget
from eagle31.errors import UserError
from tests.data.capture.transport.mooncake_master import Master, free_ports, running_master
from tests.processes import command_of
from tests.runs.forked import Ranks, start
from tests.train.small_run import MAIN, RECIPE, arguments, metrics_of, wait_for_step
from tests.train.torchrun import run_here, torchrun

STEPS = 6


@pytest.fixture(scope="module")
def master(mooncake: Path | None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Master]:
    with running_master(tmp_path_factory.mktemp("mooncake")) as one:
        yield one


@pytest.fixture(scope="module")
def with_answers(small_target: EmbeddedTarget, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("answers") / "run"
    run_here(RECIPE, *arguments(small_target, directory), "stages=[data,vocab,answers]")
    return directory


def settings(*more: str) -> list[str]:
    """Return settings with one sample per batch, whose states do not depend on other samples."""
    own = ["capture.mode=online", f"train.max_steps={STEPS}"]
    return [*own, "train.validate_every=3", "train.save_every=6", "stages=[capture,train]", *more]


def through(address: str) -> list[str]:
    mooncake = ["capture.source=vllm", "capture.spool_gb=0.01", "capture.transport=mooncake"]
    return settings(*mooncake, f"capture.mooncake.master={address}", "capture.mooncake.segment_gb=0.02")


def losses_of(directory: Path) -> list[float]:
    return [record["loss"] for record in metrics_of(directory) if record["kind"] == "train"]


@pytest.mark.full("it starts vLLM twice")
def test_two_ranks_train_through_the_store_though_the_engine_is_killed(
    small_target: EmbeddedTarget,
    with_answers: Path,
    master: Master,
    vllm_python: Path,
    tmp_path: Path,
) -> None:
    check_mooncake(vllm_python)
    directory, plain = tmp_path / "run", tmp_path / "plain"
    shutil.copytree(with_answers, plain)
    torchrun(MAIN, f"recipe={RECIPE}", *arguments(small_target, plain), *settings())
    shutil.copytree(with_answers, directory)
    command = [MAIN, f"recipe={RECIPE}", *arguments(small_target, directory), *through(master.address)]
    ranks = start(*command, log=tmp_path / "log", num_processes=2)
    wait_for_step(directory, 1)
    engine_of(ranks).kill()
    assert ranks.wait() == 0, ranks.printed()
    assert losses_of(directory) == pytest.approx(losses_of(plain), rel=1e-3)


def engine_of(ranks: Ranks) -> psutil.Process:
    """Return vLLM's process that the run started."""
    parents = [psutil.Process(one.pid) for one in ranks.processes]
    children = [child for one in parents for child in one.children(recursive=True)]
    [engine] = [one for one in children if "vllm.entrypoints.openai.api_server" in command_of(one)[2:5]]
    return engine


def test_a_missing_master_is_reported_before_any_stage(
    small_target: EmbeddedTarget, mooncake: Path | None, vllm_python: Path, tmp_path: Path
) -> None:
    (port,) = free_ports(1)
    command = [*arguments(small_target, tmp_path), *through(f"127.0.0.1:{port}")]
    with pytest.raises(UserError, match=rf"127\.0\.0\.1:{port}: No master answers at this address"):
        run_here(RECIPE, *command, "stages=[data,vocab,answers,capture,train]")
    assert not list(tmp_path.glob("artifacts/*"))
