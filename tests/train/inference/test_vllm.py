"""The pipeline with vLLM running the target."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from data.embedded.target import EmbeddedTarget
from data.store import HiddenStateStore
from eagle31.errors import UserError
from eagle31.json_files import read_jsonl
from tests.train import small_run
from tests.train.small_run import MAIN, RECIPE, TEXT_STAGES
from tests.train.torchrun import composed, run_here, torchrun
from train.context import RunContext
from train.distributed import World
from train.pipeline import run_stages


def arguments(target: EmbeddedTarget, output_dir: Path) -> list[str]:
    few = ["data.num_validation=4", "data.num_test=3", "data.max_tokens=192", "capture.max_samples=24"]
    return [*small_run.arguments(target, output_dir), *few, "train.rows_per_step=2", "train.max_steps=6"]


def online(spools: Path) -> list[str]:
    return [
        "capture.source=vllm",
        "capture.mode=online",
        f"capture.spool_dir={spools}",
        "capture.spool_gb=0.01",
    ]


@pytest.fixture(scope="module")
def by_hf(small_target: EmbeddedTarget, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("captured") / "run"
    run_here(RECIPE, *arguments(small_target, directory), TEXT_STAGES)
    return directory


def stores(directory: Path, source: str) -> Iterator[HiddenStateStore]:
    for name in ("train", "validation", "test"):
        shards = directory.glob(f"artifacts/capture-*/{name}/shard-*.safetensors")
        [store] = {path.parent for path in shards if path.name.startswith("shard-hf-") == (source == "hf")}
        yield HiddenStateStore(store)


def test_vllm_captures_the_same_states_as_transformers(
    small_target: EmbeddedTarget, by_hf: Path, vllm_python: Path
) -> None:
    run_here(RECIPE, *arguments(small_target, by_hf), TEXT_STAGES, "capture.source=vllm")
    for ours, theirs in zip(stores(by_hf, "hf"), stores(by_hf, "vllm"), strict=True):
        assert ours.lengths == theirs.lengths
        for a, b in zip(ours.get_many(range(len(ours))), theirs.get_many(range(len(ours))), strict=True):
            assert a.input_ids.equal(b.input_ids)
            assert a.loss_mask.equal(b.loss_mask)
            torch.testing.assert_close(a.aux_hidden_states, b.aux_hidden_states, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(a.final_hidden_states, b.final_hidden_states, rtol=1e-4, atol=1e-4)


def test_online_training_with_vllm_has_the_losses_of_offline_training(
    small_target: EmbeddedTarget, by_hf: Path, vllm_python: Path, tmp_path: Path
) -> None:
    command = [*arguments(small_target, by_hf), "stages=[capture,train]"]
    torchrun(MAIN, f"recipe={RECIPE}", *command)
    torchrun(MAIN, f"recipe={RECIPE}", *command, *online(tmp_path))
    curves = [
        [record for record in read_jsonl(path) if record["kind"] == "train"]
        for path in by_hf.glob("artifacts/train-*/metrics.jsonl")
    ]
    [offline] = [curve for curve in curves if "spool_gb" not in curve[0]]
    [streamed] = [curve for curve in curves if "spool_gb" in curve[0]]
    assert [r["loss"] for r in streamed] == pytest.approx([r["loss"] for r in offline], rel=1e-3)
    assert not list(tmp_path.iterdir())


def test_several_ranks_without_servers_are_refused_before_any_stage(tmp_path: Path) -> None:
    needed = ["target.model=nowhere", "data.train=nowhere.jsonl", f"output_dir={tmp_path / 'run'}"]
    config = composed(RECIPE, *needed, *online(tmp_path))
    with pytest.raises(UserError, match=r"vllm\.servers"):
        run_stages(RunContext(config, World(rank=1, local_rank=1, size=2)))
