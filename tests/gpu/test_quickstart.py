"""The quickstart's stages on the device, then what reads its results: resume, ranks, export, vLLM."""

import statistics
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from data.cache import cache_directory
from data.embedded.target import ensure_embedded_target
from data.store import HiddenStateStore
from eagle31.json_files import read_json
from tests.gpu.conftest import Figure
from tests.gpu.runs import (
    SAVE_EVERY,
    TO_TRAINING,
    Check,
    evaluation_of,
    kill_after,
    losses,
    run,
    training_records,
)
from tests.runs.model_runner import model_runner

LOSS_BOUND = 0.02  # relative; on a CPU two runs are the same to the bit
STATE_BOUNDS = {"cpu": 1e-3, "cuda": 3e-2}  # float32 and bf16; relative to the norm of the states


@pytest.fixture(scope="session")
def quickstart(check: Check) -> Path:
    """The finished quickstart; the same directory is continued where it was interrupted."""
    run(check.command(check.quickstart))
    return check.quickstart


def target() -> str:
    return str(ensure_embedded_target(cache_directory() / "embedded", progress=False).model)


@pytest.mark.at_most(270)  # with the run that the other tests read
def test_the_loss_falls_and_decoding_is_exact(quickstart: Path, figure: Figure) -> None:
    for stage in read_json(quickstart / "report" / "metrics.json")["run"]["stages"]:
        figure(f"stage {stage['name']}", float(stage["seconds"]), "s")
    records, evaluation = training_records(quickstart), evaluation_of(quickstart)
    figure("tokens per second in training", statistics.median(one["tokens_per_second"] for one in records))
    decoding = evaluation["decoding"]
    figure("acceptance length in decoding", decoding["acceptance_length"])
    assert records[-1]["loss"] < records[0]["loss"]
    assert decoding["completions"]["num_different"] == 0
    assert decoding["replay"]["num_different"] == 0


@pytest.mark.at_most(60)
def test_training_that_is_killed_resumes(quickstart: Path, check: Check, figure: Figure) -> None:
    directory = check.captured_copy("resume")
    line = check.command(directory, TO_TRAINING)
    kill_after(line, directory, SAVE_EVERY + 2)
    figure("the rest of the training", run(line), "s")
    compare_losses(quickstart, directory, figure)


@pytest.mark.at_most(60)
def test_two_ranks_have_the_losses_of_one(quickstart: Path, check: Check, figure: Figure) -> None:
    require_two(check)
    directory = check.captured_copy("two_ranks")
    run(check.command(directory, TO_TRAINING, num_processes=2))
    compare_losses(quickstart, directory, figure)


def compare_losses(expected: Path, found: Path, figure: Figure) -> None:
    one, other = losses(expected), losses(found)
    last = max(one)
    assert max(other) == last
    difference = abs(one[last] - other[last]) / one[last]
    figure("difference of the last loss", difference)
    assert difference <= LOSS_BOUND


def require_two(check: Check) -> None:
    if not check.small and torch.cuda.device_count() < 2:
        # Gloo would take them. Of a GPU's tensors it has all-reduce and broadcast alone, by PyTorch's list of
        # what backends have, and ZeRO 1 needs more.
        pytest.skip("there is one GPU, and NCCL refuses two ranks on it")


@pytest.mark.at_most(20)
def test_the_export_is_valid(quickstart: Path) -> None:
    run([sys.executable, "scripts/validate_export", str(quickstart / "export"), "--target", target()])


@pytest.mark.at_most(110)
@pytest.mark.parametrize(("num_gpus", "runner"), [(1, "V1"), (1, "V2"), (2, None)])
def test_vllm_captures_the_states_of_transformers(
    quickstart: Path,
    check: Check,
    vllm_python: Path,
    figure: Figure,
    num_gpus: int,
    runner: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if num_gpus == 2:
        require_two(check)
        # On a CPU, vLLM refuses two workers on one NUMA node unless their cores are given.
        monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    directory = check.captured_copy(f"capture_{num_gpus}_{runner}", "capture")
    stages = "stages=[data,vocab,answers,capture]"
    parallel = f"vllm.engine_args.tensor_parallel_size={num_gpus}"
    chosen = nullcontext() if runner is None else model_runner(runner, vllm_python, tmp_path / "vllm")
    with chosen:
        seconds = run(check.command(directory, "capture=vllm", stages, parallel))
    figure("the run, with vLLM's start", seconds, "s")
    ours, theirs = (
        HiddenStateStore(next(path.glob("artifacts/capture-*/train"))) for path in (quickstart, directory)
    )
    assert len(ours) == len(theirs)
    worst = 0.0
    for index in range(len(ours)):
        one, other = ours[index], theirs[index]
        assert torch.equal(one.input_ids, other.input_ids)
        pairs = (
            (one.aux_hidden_states, other.aux_hidden_states),
            (one.final_hidden_states, other.final_hidden_states),
        )
        worst = max(worst, *(float((b - a).double().norm() / a.double().norm()) for a, b in pairs))
    figure("largest error of a sample's states", worst)
    assert worst <= STATE_BOUNDS[check.device.type]


@pytest.mark.at_most(100)
@pytest.mark.parametrize("runner", ["V1", "V2"])
def test_vllm_drafts_as_the_trained_drafter_does(
    quickstart: Path, check: Check, vllm_python: Path, figure: Figure, runner: str, tmp_path: Path
) -> None:
    numbers = check.output / f"serving_{runner}.json"
    few = ["--num-prompts", "4", "--max-new-tokens", "16"] if check.small else []
    dtype = "float32" if check.small else "bfloat16"
    line = [sys.executable, "scripts/check_serving", str(quickstart / "export"), "--target", target()]
    with model_runner(runner, vllm_python, tmp_path / "vllm"):
        run([*line, "--dtype", dtype, "--json", str(numbers), *few])
    found = read_json(numbers)
    assert found["model_runner"] == runner
    figure("engine", found["engine"])
    for side in ("replay", "vllm"):
        figure(f"acceptance length, {side}", float(found[side]["acceptance_length"]))
