"""A run of two ranks whose target is in vLLM in every stage, next to a run in transformers."""

import json
from pathlib import Path

import psutil
import pytest
import torch
from datasets import Dataset, load_from_disk

from data.capture.transport.spool import MEMORY
from data.embedded.target import EmbeddedTarget
from data.store import HiddenStateStore
from eagle31.json_files import read_jsonl
from tests.train import small_run
from tests.train.small_run import MAIN, RECIPE
from tests.train.torchrun import run_here, torchrun
from train.engines.transport import rank_name

NUM_CONVERSATIONS = 16
STAGES = "stages=[data,vocab,answers,capture,train]"  # those that send to the server


def arguments(target: EmbeddedTarget, data: Path, output_dir: Path) -> list[str]:
    """Return settings with one prompt per batch: completions then do not depend on other prompts."""
    few = ["data.num_validation=3", "data.num_test=3", "data.max_tokens=192", "evaluate.max_new_tokens=16"]
    regenerate = [
        "data.regenerate.enabled=true",
        "data.regenerate.max_new_tokens=12",
        "data.regenerate.temperature=0",
        "data.regenerate.batch_size=1",
    ]
    training = ["train.rows_per_step=2", "train.max_steps=6", f"data.train={data}"]
    return [*small_run.arguments(target, output_dir), *few, *regenerate, *training]


def short_conversations(target: EmbeddedTarget, path: Path) -> Path:
    rows = sorted((row["messages"] for row in read_jsonl(target.train)), key=lambda row: len(str(row)))
    path.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows[:NUM_CONVERSATIONS]))
    return path


@pytest.fixture(scope="module")
def data(small_target: EmbeddedTarget, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return short_conversations(small_target, tmp_path_factory.mktemp("data") / "data.jsonl")


@pytest.fixture(scope="module")
def in_transformers(
    small_target: EmbeddedTarget, data: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    directory = tmp_path_factory.mktemp("transformers") / "run"
    run_here(RECIPE, *arguments(small_target, data, directory), STAGES)
    return directory


@pytest.fixture(scope="module")
def in_vllm(
    vllm_python: Path,
    small_target: EmbeddedTarget,
    data: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """Two ranks, without any server: the run starts the one that it needs."""
    directory = tmp_path_factory.mktemp("vllm") / "run"
    engine = ["target.engine=vllm", "capture=vllm_online", "capture.spool_gb=0.02", STAGES]
    torchrun(MAIN, f"recipe={RECIPE}", *arguments(small_target, data, directory), *engine, num_processes=2)
    return directory


def result(output_dir: Path, name: str) -> Path:
    [found] = (output_dir / "artifacts").glob(name)
    return found


@pytest.mark.parametrize("name", ["data-*/train", "answers-*/validation", "answers-*/test"])
def test_vllm_writes_the_completions_that_transformers_writes(
    in_vllm: Path, in_transformers: Path, name: str
) -> None:
    ours: Dataset = load_from_disk(str(result(in_vllm, name)))
    assert ours.to_list() == load_from_disk(str(result(in_transformers, name))).to_list()


@pytest.mark.parametrize("name", ["validation", "test"])
def test_vllm_captures_the_states_that_transformers_captures(
    in_vllm: Path, in_transformers: Path, name: str
) -> None:
    stores = [HiddenStateStore(result(run, f"capture-*/{name}")) for run in (in_vllm, in_transformers)]
    assert list(stores[0].lengths) == list(stores[1].lengths)
    assert len(stores[0]) == 3
    for a, b in zip(*(store.get_many(range(len(store))) for store in stores), strict=True):
        assert a.input_ids.equal(b.input_ids)
        assert a.loss_mask.equal(b.loss_mask)
        torch.testing.assert_close(a.aux_hidden_states, b.aux_hidden_states, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(a.final_hidden_states, b.final_hidden_states, rtol=1e-4, atol=1e-4)


def test_two_ranks_online_have_the_losses_of_one_rank_offline(in_vllm: Path, in_transformers: Path) -> None:
    losses = [
        [record["loss"] for record in small_run.metrics_of(run) if record["kind"] == "train"]
        for run in (in_vllm, in_transformers)
    ]
    assert len(losses[0]) == 6
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


def test_one_server_writes_and_another_captures_and_nothing_of_them_is_left(in_vllm: Path) -> None:
    log = (in_vllm / "vllm-0.log").read_text()
    starts = log.split("non-default args: ")[1:]
    assert ["extract_hidden_states" in start for start in starts] == [False, True]
    assert "{'host': '127.0.0.1', 'port'" in log
    assert not list(MEMORY.glob(f"eagle31-{rank_name(in_vllm, 0)[:-1]}*"))
    commands = [" ".join(process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"])]
    assert not [command for command in commands if str(in_vllm) in command]
