"""What is logged of the steps between two records."""

import time
from dataclasses import replace

import pytest
import torch

from data.batches.device_rows import RowCounts
from eagle31.training.step import DepthSums
from tests.pretended_gpu.device import CUDA, PretendedGpu
from train.distributed import World
from train.trainer.metrics import Speed, StepTimes, WindowSums

WORLD = World(rank=0, local_rank=0, size=1)
ZEROS = torch.zeros(2)


def window_of(num_steps: int) -> WindowSums:
    """A window of steps of 0.1 s, each with 5 supervised positions and 8 tokens; the last takes 0.4 s."""
    window = WindowSums(2, torch.device("cpu"))
    times = [0.1] * (num_steps - 1) + [0.4]
    window.steps.seconds = lambda: times  # type: ignore[method-assign]
    for _ in range(num_steps):
        window.add(DepthSums(*(torch.tensor([5.0, 3.0]) for _ in range(5))), with_metrics=True)
        window.count(RowCounts(num_supervised=5, num_tokens=8, flops=1000))
    return window


def test_means_are_over_the_rows_of_their_depth_and_metrics_over_the_steps_that_have_them() -> None:
    window = WindowSums(3, torch.device("cpu"))  # of which the last depth is not rolled out
    num_rows = torch.tensor([8.0, 2.0])
    means = {"loss": [2.0, 3.0], "agreement": [0.5, 0.25], "expected_acceptance": [0.75, 0.125]}
    means |= {"weighted_loss": [2.0, 1.5]}
    sums = DepthSums(num_rows, **{name: num_rows * torch.tensor(mean) for name, mean in means.items()})
    window.add(sums, with_metrics=True)
    window.add(replace(sums, agreement=ZEROS, expected_acceptance=ZEROS), with_metrics=False)
    window.add(sums, with_metrics=True)
    metrics = window.metrics(WORLD)
    assert metrics["depth"] == [
        {"loss": 2, "agreement": 0.5, "expected_acceptance": 0.75, "num_rows": 24},
        {"loss": 3, "agreement": 0.25, "expected_acceptance": 0.125, "num_rows": 6},
    ]
    assert metrics["loss"] == (2 * 8 + 1.5 * 2) / 8  # of all depths, per supervised position
    assert metrics["supervised_positions"] == 24


def test_rates_count_no_padding_and_have_validation_in_their_time() -> None:
    window = window_of(10)
    window.waited_seconds = 0.65  # of 1.3
    with window.timed("validation"):
        time.sleep(0.05)
    metrics = window.metrics(WORLD)
    assert metrics["seconds"] >= metrics["validation_seconds"] >= 0.05
    assert metrics["checkpoint_seconds"] == metrics["diagnosis_seconds"] == 0
    assert (metrics["data_wait_seconds"], metrics["num_ranks"]) == (0.65, 1)
    assert metrics["data_wait_fraction"] == pytest.approx(0.5)
    assert metrics["tokens_per_second"] == pytest.approx(80 / metrics["seconds"])
    assert metrics["supervised_positions_per_second"] == pytest.approx(50 / metrics["seconds"])
    assert (metrics["step_seconds_p50"], metrics["step_seconds_p95"]) == (0.1, 0.4)


def test_utilization_and_memory_are_there_on_a_known_gpu_only() -> None:
    unknown = window_of(10).metrics(WORLD)
    assert not {"model_flops_utilization", "peak_memory_gb"} & unknown.keys()
    known = window_of(10).metrics(WORLD, Speed(1e5, planned_bytes=3 * 10**9))
    # 10,000 FLOPs in 1.3 seconds.
    assert known["model_flops_utilization"] == pytest.approx(10_000 / 1.3 / 1e5)
    assert (known["peak_memory_gb"], known["planned_memory_gb"]) == (0, 3)


def test_the_device_times_its_steps_and_the_host_waits_once() -> None:
    with PretendedGpu() as gpu:
        times = StepTimes(CUDA)
        with gpu.no_waiting():
            for _ in range(3):
                times.begin()
                times.end()
        assert times.seconds() == [0.001] * 3
        assert len(gpu.waits) == 1
