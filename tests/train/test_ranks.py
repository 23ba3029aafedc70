"""Runs on many ranks, over fewer held-out prompts, shards and validation rows than ranks.

Three ranks run always: tests/runs/test_kills.py.
"""

from pathlib import Path

import pytest

from data.embedded.target import EmbeddedTarget
from eagle31.json_files import read_json
from tests.train.small_quickstart import small_quickstart
from tests.train.small_run import MAIN, metrics_of, saved_steps
from tests.train.torchrun import torchrun

STEPS = 3
STORES = ("train", "validation")
RUN_SECONDS = 1200
CASES = [(4, 3), (8, 0), (8, 3), (16, 1), (16, 2)]


@pytest.mark.full("it starts up to 16 ranks")
@pytest.mark.parametrize(("num_ranks", "stage"), CASES)
@pytest.mark.timeout(2 * RUN_SECONDS)
def test_many_ranks_train_as_one_does(
    small_target: EmbeddedTarget,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    num_ranks: int,
    stage: int,
) -> None:
    settings = [
        *small_quickstart(small_target, tmp_path, monkeypatch),
        *few(num_ranks),
        f"deepspeed=zero{stage}",
    ]
    command = [MAIN, "recipe=quickstart", *settings, "deepspeed.precision=fp32"]
    printed = torchrun(*command, num_processes=num_ranks, seconds=RUN_SECONDS)
    assert "acceptance length" in printed
    run = tmp_path / "run"
    assert (run / "report" / "index.html").is_file()
    assert saved_steps(run)[-1] == f"step-{STEPS:08d}"
    [checkpoint] = run.glob(f"artifacts/train-*/checkpoints/step-{STEPS:08d}/state.json")
    assert read_json(checkpoint)["world_size"] == num_ranks
    # Each rank that had a sample wrote a shard; there are fewer held-out prompts than ranks.
    shards = [len(list(run.glob(f"artifacts/capture-*/{name}/*.safetensors"))) for name in STORES]
    num_held_out = shards[1] - 1  # without the index
    assert shards[0] - 1 == num_ranks > num_held_out > 0
    records = metrics_of(run)
    [trained] = run.glob("artifacts/train-*")
    trained.rename(tmp_path / "many_ranks")
    torchrun(*command, "stages=[train]", seconds=RUN_SECONDS)
    for ours, theirs in zip(records, metrics_of(run), strict=True):
        assert ours["kind"] == theirs["kind"]
        compared = ("loss", "grad_norm", "supervised_positions", "acceptance_length", "num_drafts")
        for name in set(compared) & ours.keys():
            assert ours[name] == pytest.approx(theirs[name], rel=1e-4), name


@pytest.mark.full("it starts eight ranks twice")
@pytest.mark.timeout(2 * RUN_SECONDS)
@pytest.mark.parametrize("capture", ["hf_online", "vllm_online"])
def test_eight_ranks_train_online_as_one_does_offline(
    small_target: EmbeddedTarget,
    vllm_python: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capture: str,
) -> None:
    """With vllm_online, all ranks send to the one server that the run starts."""
    settings = [
        *small_quickstart(small_target, tmp_path, monkeypatch),
        *few(8),
        f"capture.spool_dir={tmp_path}",
    ]
    command = [MAIN, "recipe=quickstart", *settings, "stages=[data,vocab,answers,capture,train]"]
    torchrun(*command, f"capture={capture}", num_processes=8, seconds=RUN_SECONDS)
    streamed = losses(tmp_path / "run")
    [trained] = (tmp_path / "run").glob("artifacts/train-*")
    trained.rename(tmp_path / "streamed")
    torchrun(*command, seconds=RUN_SECONDS)
    assert streamed == pytest.approx(losses(tmp_path / "run"), rel=1e-3)


def losses(directory: Path) -> list[float]:
    return [record["loss"] for record in metrics_of(directory) if record["kind"] == "train"]


def few(num_ranks: int) -> list[str]:
    """Return settings with few samples and held-out prompts, and one row for each rank and step."""
    return [
        "data.num_validation=3",
        "data.num_test=2",
        f"capture.max_samples={4 * num_ranks}",
        f"train.rows_per_step={num_ranks}",
        f"train.max_steps={STEPS}",
        "train.ttt_steps=2",
        "train.log_every=1",
        "train.validate_every=2",
        "evaluate.temperature=null",
    ]
