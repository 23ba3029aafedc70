"""Runs whose target is run by TorchSpec's engine, on a CPU with its CUDA calls replaced."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from data.embedded.target import EmbeddedTarget
from data.store import HiddenStateStore
from data.transport.mooncake_store import library_directory
from tests.data.torchspec.ray_node import ON_CPU, running_node
from tests.data.transport.mooncake_master import Master, running_master
from tests.torchspec_python import torchspec_python
from tests.train.small_run import MAIN, RECIPE, arguments, metrics_of
from tests.train.torchrun import torchrun

STEPS = 6


@pytest.fixture(scope="module")
def master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Master]:
    """A Mooncake master and a Ray node, which the runs find."""
    python = torchspec_python()
    directory = tmp_path_factory.mktemp("ts")
    with running_master(directory) as one, pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ON_CPU))
        with running_node(python, directory, str(library_directory())) as address:
            patch.setenv("RAY_ADDRESS", address)
            yield one


def run(
    target: EmbeddedTarget, master: Master, directory: Path, *extra: str, num_processes: int
) -> list[float]:
    """Run, and return the losses."""
    settings = [
        "capture.source=torchspec",
        f"capture.torchspec.python={torchspec_python()}",
        f"capture.mooncake.master={master.address}",
        f"capture.mooncake.metadata={master.metadata}",
        "capture.mooncake.segment_gb=0.02",
        "capture.spool_gb=0.01",
        f"train.max_steps={STEPS}",
        "train.validate_every=3",
        "train.save_every=6",
        "stages=[data,vocab,answers,capture,train]",
    ]
    command = [*arguments(target, directory), *settings, *extra]
    torchrun(MAIN, f"recipe={RECIPE}", *command, num_processes=num_processes)
    return [record["loss"] for record in metrics_of(directory) if record["kind"] == "train"]


def test_a_run_trains_from_what_its_engine_captured(
    small_target: EmbeddedTarget, master: Master, tmp_path: Path
) -> None:
    offline = run(small_target, master, tmp_path / "offline", num_processes=1)
    assert len(offline) == STEPS
    [train] = (tmp_path / "offline").glob("artifacts/capture-*/train")
    store = HiddenStateStore(train)
    assert store.manifest["dtype"] == str(store[0].aux_hidden_states.dtype).removeprefix("torch.")
    online = run(small_target, master, tmp_path / "online", "capture.mode=online", num_processes=2)
    assert online == pytest.approx(offline, rel=1e-3)
