"""Runs whose hidden states come from TorchSpec's engines, in a real Ray, through its store."""

from pathlib import Path

import psutil
import pytest

from data.embedded.target import EmbeddedTarget
from tests.data.capture.vllm.targets import KV_CACHE_BYTES
from tests.processes import command_of
from tests.runs.forked import Ranks, start
from tests.runs.here import run_command
from tests.train.small_run import MAIN, RECIPE, arguments, metrics_of, wait_for_step
from tests.train.torchrun import run_here

SETTINGS = (
    "target.dtype=bfloat16",  # the one that TorchSpec has
    "train.max_steps=6",
    "train.validate_every=3",
    "train.save_every=3",
    "export.dtype=float32",
    "stages=[data,vocab,answers,capture,train,export]",
)
# Samples of about two steps wait for each rank.
ENGINES = (
    "capture=torchspec",
    "capture.codec=exact",
    "capture.spool_gb=0.002",
)


def begin(target: EmbeddedTarget, directory: Path, *more: str) -> Ranks:
    command = [MAIN, f"recipe={RECIPE}", *arguments(target, directory), *SETTINGS, *ENGINES, *more]
    return start(*command, log=directory.with_suffix(".log"), num_processes=2)


def ray_processes(ranks: Ranks, name: str) -> list[psutil.Process]:
    """Return the processes of the run's Ray with this in their command."""
    parents = [psutil.Process(one.pid) for one in ranks.processes]
    children = [child for one in parents for child in one.children(recursive=True)]
    return [child for child in children if name in " ".join(command_of(child))]


def trained(directory: Path) -> list[float]:
    """Return the losses by step, and the acceptance lengths of the validations."""
    records = metrics_of(directory)
    losses = [record["loss"] for record in records if record["kind"] == "train"]
    lengths = [record["acceptance_length"] for record in records if "acceptance_length" in record]
    return losses + [length for by_length in lengths for length in by_length.values()]


@pytest.fixture(scope="module")
def expected(small_target: EmbeddedTarget, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """What a run has whose states come from transformers in its own process."""
    directory = tmp_path_factory.mktemp("plain") / "run"
    run_here(RECIPE, *arguments(small_target, directory), *SETTINGS, "capture=hf_online")
    return trained(directory)


@pytest.mark.full("it starts Ray, and vLLM")
def test_two_ranks_train_from_an_engine_that_is_killed_to_an_export_that_vllm_serves(
    torchspec: Path,
    small_target: EmbeddedTarget,
    expected: list[float],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    directory = tmp_path / "run"
    ranks = begin(small_target, directory)
    wait_for_step(directory, 1, ranks)
    [engine] = ray_processes(ranks, "HFEngine")
    engine.kill()
    assert ranks.wait() == 0, ranks.printed()
    assert trained(directory) == pytest.approx(expected, rel=0.02)
    # Only now: the environment may still be in the making.
    monkeypatch.setenv("EAGLE31_VLLM_PYTHON", str(request.getfixturevalue("vllm_python")))
    served = run_command(
        "scripts/check_serving",
        *(directory / "export", "--target", small_target.model, "--dtype", "float32"),
        *("--max-new-tokens", 24, "--engine-args", f"kv_cache_memory_bytes={KV_CACHE_BYTES}"),
    )
    assert "verdict: vLLM serves what was trained" in served.out, served.err


@pytest.mark.full("it starts Ray twice")
def test_a_killed_run_of_two_engines_resumes_and_leaves_no_process(
    torchspec: Path, small_target: EmbeddedTarget, expected: list[float], tmp_path: Path
) -> None:
    directory = tmp_path / "run"
    ranks = begin(small_target, directory, "torchspec.num_engines=2")
    wait_for_step(directory, 4, ranks)
    started = ray_processes(ranks, "")
    assert len(ray_processes(ranks, "HFEngine")) == 2
    ranks.kill()
    psutil.wait_procs(started)
    ranks = begin(small_target, directory, "torchspec.num_engines=2")
    assert ranks.wait() == 0, ranks.printed()
    assert trained(directory) == pytest.approx(expected, rel=0.02)
