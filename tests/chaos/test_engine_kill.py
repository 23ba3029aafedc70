"""vLLM's engine is killed while it writes a store; the run starts it again and has every sample once."""

import threading
import time
from pathlib import Path

import psutil
import pytest
import torch

from data.embedded.target import EmbeddedTarget
from data.store import HiddenStateStore
from data.store.shards import FinishedShards
from tests.chaos.runs import SMALLER
from tests.data.vllm.targets import KV_CACHE_BYTES
from tests.train.conftest import small_target  # noqa: F401
from tests.train.small_run import MAIN, RECIPE, arguments
from tests.train.torchrun import run_here, torchrun

pytestmark = pytest.mark.timeout(1800)
STAGES = "stages=[data,vocab,answers,capture]"


def kill_engine_while_it_writes(store: Path, killed: list[int]) -> None:
    """Kill the engine of the run's server as soon as it has written the first shard of the store."""
    while not list(store.parent.glob("capture-*/train/shard-*.json")):
        time.sleep(0.001)
    for process in psutil.process_iter(["name", "cmdline"]):
        text = f"{process.info['name']} {' '.join(process.info['cmdline'] or [])}"
        if "EngineCor" in text:
            process.kill()
            killed.append(process.pid)


@pytest.mark.full("it starts vLLM's engine twice")
def test_every_sample_is_captured_once_though_the_engine_is_killed(
    small_target: EmbeddedTarget,  # noqa: F811
    vllm_python: Path,
    tmp_path: Path,
) -> None:
    plain = tmp_path / "transformers"
    run_here(RECIPE, *arguments(small_target, plain), *SMALLER, STAGES)
    output = tmp_path / "vllm"
    engine = ["capture=vllm", "capture.shard_tokens=1500", "capture.max_pending_gb=0.01"]
    engine.append(f"vllm.engine_args={{kv_cache_memory_bytes: {KV_CACHE_BYTES}, max_num_seqs: 2}}")
    killed: list[int] = []
    watch = threading.Thread(target=kill_engine_while_it_writes, args=(output / "artifacts" / "any", killed))
    watch.daemon = True
    watch.start()
    command = [f"recipe={RECIPE}", *arguments(small_target, output), *SMALLER, *engine, STAGES]
    torchrun(MAIN, *command, seconds=1200)
    assert killed, "the engine had ended before its first shard was there"
    assert (output / "vllm-0.log").read_text().count("Application startup complete") == 2
    [store], [expected] = (list(run.glob("artifacts/capture-*/train")) for run in (output, plain))
    ours, theirs = HiddenStateStore(store), HiddenStateStore(expected)
    ours.verify()
    written = [sample for record in FinishedShards(store).records() for sample in record.sample_ids]
    assert sorted(set(written)) == ours.sample_ids.tolist() == list(range(len(theirs)))
    for index in range(len(theirs)):
        assert ours[index].input_ids.equal(theirs[index].input_ids)
        torch.testing.assert_close(
            ours[index].aux_hidden_states, theirs[index].aux_hidden_states, rtol=1e-4, atol=1e-4
        )
