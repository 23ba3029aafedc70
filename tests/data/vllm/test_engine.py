"""A local engine of a target with latent attention."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch

from data.capture.hf import HiddenStateCapture
from data.capture.offline import StoreSpec, capture_to_store
from data.store import HiddenStateStore
from data.store.codec import Encoding
from data.store.shards import captured_ids
from data.target.loading import load_target
from data.target.modules import locate
from data.vllm.arguments import CaptureEngine
from data.vllm.client import capture_through_vllm
from data.vllm.engine import LocalEngine
from eagle31.errors import UserError
from tests.data.vllm.targets import (
    capture_engine,
    expected_states,
    largest_difference,
    make_hostile_directory,
    make_samples,
    save_mla,
)

IDS = (1, 2, 3, 4)
NUM_SAMPLES = 400
START_SECONDS = 180
FIELDS = {"target": "tiny"}


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_an_engine_is_started_again_and_ends_with_its_parent(vllm_python: Path, tmp_path: Path) -> None:
    """Every layer's states equal those of transformers; what was captured before a death is kept."""
    spec, dataset, store = save_mla(tmp_path / "target"), make_samples(NUM_SAMPLES), tmp_path / "store"
    script = Path(__file__).with_name("client_process.py")
    arguments = [spec.model, str(tmp_path), json.dumps(IDS), str(NUM_SAMPLES)]
    # The user's modules have our names: neither the working directory nor PYTHONPATH may matter.
    hostile = make_hostile_directory(tmp_path / "hostile")
    client = subprocess.Popen(
        [sys.executable, str(script), *arguments],
        cwd=hostile,
        env=os.environ | {"PYTHONPATH": str(hostile)},
    )

    def num_captured() -> int:
        return len(captured_ids(store)) if store.exists() else 0

    wait_for(lambda: num_captured() > 0)
    [first] = psutil.Process(client.pid).children()
    first.kill()
    before = num_captured()
    assert before < NUM_SAMPLES * 3 / 4
    wait_for(lambda: num_captured() > before + NUM_SAMPLES / 8)
    [second] = psutil.Process(client.pid).children()
    assert second.pid != first.pid
    os.kill(client.pid, signal.SIGKILL)
    assert client.wait(timeout=60) == -signal.SIGKILL
    wait_for(lambda: not second.is_running())
    assert before < num_captured() < NUM_SAMPLES
    model = load_target(spec, torch.device("cpu"))
    capture_to_store(
        StoreSpec(store, dataset, Encoding("exact", "all")),
        HiddenStateCapture(model, locate(model, spec), IDS),
        shard_tokens=500,
        batch_tokens=2000,
        manifest_fields=FIELDS,
    )
    finished = HiddenStateStore(store)
    assert len(finished) == NUM_SAMPLES
    assert largest_difference(finished, dataset, spec, IDS) < 1e-5


def test_an_engine_that_cannot_start_says_why(vllm_python: Path, tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    engine = LocalEngine({"model": str(tmp_path / "target")}, tmp_path / "engine.log")
    spec = save_mla(tmp_path / "other")
    with pytest.raises(UserError, match=r"before it was ready:\n  \| (.|\n)*engine\.log"):
        capture_through_vllm(
            [StoreSpec(tmp_path / "store", make_samples(2), Encoding())],
            expected_states(spec, IDS),
            [engine],
            shard_tokens=500,
            manifest_fields=FIELDS,
        )


def test_what_vllm_cannot_give_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"aux_layer_ids=\[0, 2\]: vLLM gives no embedding output"):
        CaptureEngine("target", (0, 2), 4, 100, [str(tmp_path)], mla=True)
    with pytest.raises(
        UserError, match=r"engine_args\.pipeline_parallel_size=2: Only the last stage would have"
    ):
        capture_engine(save_mla(tmp_path), IDS, tmp_path, pipeline_parallel_size=2)
