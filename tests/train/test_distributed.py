"""Which GPU a process uses, before it does anything else."""

import pytest
import torch

from data.capture import hf_worker
from data.target import loading
from train import pipeline
from train.config.run import RunConfig
from train.distributed import World


class Reached(Exception):
    """Ends a test at the first thing that could use a GPU."""


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """The devices that become the current one, on a machine that seems to have GPUs."""
    found: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", found.append)
    return found


def reach(*_: object) -> None:
    raise Reached


def test_a_rank_takes_its_gpu_first(chosen: list[torch.device], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "RunContext", reach)
    with pytest.raises(Reached):
        pipeline.run_pipeline(RunConfig(), World(rank=5, local_rank=1, size=8))
    assert chosen == [torch.device("cuda", 1)]


def test_a_capture_process_takes_its_gpu_first(
    chosen: list[torch.device], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "load_target", reach)
    settings = {"target": {"model": "any"}, "device": "cuda:3", "aux_layer_ids": [1]}
    with pytest.raises(Reached):
        hf_worker.open_capture(settings)
    assert chosen == [torch.device("cuda", 3)]
