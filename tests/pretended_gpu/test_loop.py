"""The training loop's step on a GPU: from the rows of the loader to the updated weights."""

from collections.abc import Callable
from concurrent.futures import Executor, Future
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from data.batches.device_rows import DeviceRows
from eagle31.training.step import DepthSums
from scripts.bench.pretended_gpu.backward import backward
from scripts.bench.pretended_gpu.device import CUDA, PretendedGpu
from tests.pretended_gpu.steps import NUM_STEPS, configuration, drafter_on_gpu, host_batch
from train.distributed import World
from train.trainer.engine import TrainedModule, split_weights
from train.trainer.loop import optimizer_step
from train.trainer.metrics import WindowSums
from train.trainer.optimizer import ClippedAdamW, Muon
from train.trainer.skipped import SkippedSteps

NUM_ROWS, MAX_STEPS = 2, 2
DTYPE = torch.bfloat16


class Now(Executor):
    """Runs what is done in the background at once: the pretended GPU is in this thread alone."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(fn(*args, **kwargs))
        return future


class PlainEngine:
    """What a model engine does on one rank at ZeRO 0. DeepSpeed itself needs a device that computes."""

    def __init__(self, module: TrainedModule, optimizer: ClippedAdamW) -> None:
        self.module = module
        self.optimizer = self.basic_optimizer = optimizer
        self._at_boundary = False

    def __call__(self, *inputs: Any) -> tuple[Tensor, DepthSums]:
        return self.module(*inputs)

    def backward(self, loss: Tensor) -> None:
        backward(loss / NUM_ROWS)

    def gradient_accumulation_steps(self) -> int:
        return NUM_ROWS

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        self._at_boundary = is_boundary

    def step(self) -> None:
        if self._at_boundary:
            self.optimizer.step()
            self.optimizer.zero_grad()


class GpuWorld(World):
    @property
    def device(self) -> torch.device:
        return CUDA


@pytest.mark.filterwarnings("ignore:.*matrix products")
def test_an_optimizer_step_never_waits() -> None:
    config, world = configuration("gqa"), GpuWorld(rank=0, local_rank=0, size=1)
    with PretendedGpu() as gpu:
        batches = [[host_batch(config, DTYPE, seed=seed) for seed in (step, 9)] for step in range(MAX_STEPS)]
        drafter, frozen = drafter_on_gpu(config, DTYPE)
        module = TrainedModule(drafter, frozen, NUM_STEPS, 0.8)
        skipped = SkippedSteps(1e-3, lambda step: [])
        optimizer = Muon(*split_weights(drafter), 0.02, device=CUDA, max_grad_norm=0.5, lr=1e-3)
        engine = PlainEngine(module, optimizer)
        rows = DeviceRows(
            SimpleNamespace(batches=batches.__getitem__),  # type: ignore[arg-type]
            num_steps=NUM_STEPS,
            device=CUDA,
            dtype=DTYPE,
            stop_step=MAX_STEPS,
            executor=Now(),
        )
        window = WindowSums(NUM_STEPS, CUDA)

        def step(number: int) -> None:
            counts, grad_norm = optimizer_step(
                engine,  # type: ignore[arg-type]
                rows.of_step(number),
                1e-3,
                window,
                world,
                with_metrics=False,
            )
            skipped.record(number, optimizer.refused)
            assert len(counts.read()) == 2
            skipped.collect(wait=False)
            assert grad_norm.device == CUDA

        step(0)  # makes optimizer states and RoPE's tables
        with gpu.no_waiting():
            step(1)
