"""Trains on the pretended GPU as rank 0 of two under DeepSpeed, and writes for what the host waited.

It is a separate process, because it has a process group without other ranks.
"""

import json
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import real_accelerator
from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from data.batches.device_rows import DeviceRows
from tests.pretended_gpu.backward import backward
from tests.pretended_gpu.device import CUDA, PretendedGpu
from tests.pretended_gpu.steps import NUM_STEPS, configuration, drafter_on_gpu, host_batch
from train.distributed import World
from train.trainer import engine_state
from train.trainer.engine import TrainedModule, deepspeed_config, initialize_model_engine
from train.trainer.metrics import WindowSums
from train.trainer.skipped import SkippedSteps
from train.trainer.train import optimizer_step

NUM_RANKS, NUM_ROWS, MAX_STEPS = 2, 2, 2
DTYPE = torch.bfloat16


class Now(Executor):
    """Runs what is done in the background at once: the pretended GPU is in this thread alone."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(fn(*args, **kwargs))
        return future


class GpuWorld(World):
    @property
    def device(self) -> torch.device:
        return CUDA


@contextmanager
def deepspeed_on_gpu() -> Iterator[None]:
    """Have DeepSpeed take the pretended GPU for a GPU. Collective operations return at once."""
    replaced = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "is_bf16_supported": lambda: True,
        "reset_peak_memory_stats": lambda *_: None,
        "nvtx.range_push": lambda *_: None,
        "nvtx.range_pop": lambda *_: None,
    }
    with ExitStack() as stack:
        for name, value in replaced.items():
            stack.enter_context(mock.patch(f"torch.cuda.{name}", value))
        stack.enter_context(mock.patch.object(real_accelerator, "ds_accelerator", CUDA_Accelerator()))
        # The other rank's fragments of matrices, whose positions no gathered tensor has, count as ours.
        stack.enter_context(
            mock.patch.object(engine_state, "_of_all_ranks", lambda own, device: [own] * NUM_RANKS)
        )
        # DeepSpeed counts them in autograd's engine, which does not run here.
        counted = "deepspeed.runtime.zero.stage_1_and_2.count_used_parameters_in_backward"
        stack.enter_context(mock.patch(counted, len))
        yield


def waits_at(zero_stage: int) -> list[tuple[str, str, str]]:
    """Train two steps and return the waits of the second one."""
    config, world = configuration("gqa"), GpuWorld(rank=0, local_rank=0, size=NUM_RANKS)
    batches = [[host_batch(config, DTYPE, seed=seed) for seed in (step, 9)] for step in range(MAX_STEPS)]
    drafter, frozen = drafter_on_gpu(config, DTYPE)
    if zero_stage == 0:  # the model engine has the float32 weights there
        for parameter in drafter.parameters():
            parameter.data = parameter.data.float()
    module = TrainedModule(drafter, frozen, NUM_STEPS, 0.8)
    skipped = SkippedSteps(1e-3, lambda step: [])
    settings = deepspeed_config(
        zero_stage=zero_stage,
        bf16=True,
        micro_batches=NUM_ROWS,
        world_size=NUM_RANKS,
        offload_optimizer=False,
    )
    with mock.patch.object(module, "to"):  # it is there already
        engine = initialize_model_engine(module, settings, lr=1e-3, matrix_lr=0.02)

    engine.tput_timer.global_step_count = 99  # it leaves out the first steps

    def backward_of(loss: Tensor, retain_graph: bool) -> None:
        if zero_stage:  # a hook of the loss calls it
            engine._backward_prologue()
        backward(loss)

    rows = DeviceRows(
        SimpleNamespace(batches=batches.__getitem__),  # type: ignore[arg-type]
        num_steps=NUM_STEPS,
        device=CUDA,
        dtype=DTYPE,
        stop_step=MAX_STEPS,
        executor=Now(),
    )
    window = WindowSums(NUM_STEPS, CUDA)
    with mock.patch.object(Tensor, "backward", backward_of):
        for number in range(MAX_STEPS):
            before = len(gpu.waits)  # the first step makes optimizer states and RoPE's tables
            counts, grad_norm = optimizer_step(
                engine, rows.of_step(number), 1e-3, 0.5, window, world, with_metrics=False
            )
            skipped.record(number, ~grad_norm.isfinite())
            assert len(counts.read()) == 3
            skipped.collect(wait=False)
            assert grad_norm.device == CUDA
    assert torch.ops.c10d.allreduce_.default in gpu.operations
    return gpu.waits[before:]


if __name__ == "__main__":
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=NUM_RANKS)
    with PretendedGpu() as gpu, deepspeed_on_gpu():
        deepspeed.init_distributed(auto_mpi_discovery=False)
        found = {zero_stage: waits_at(zero_stage) for zero_stage in (0, 1, 2)}
    Path(sys.argv[1]).write_text(json.dumps(found))
    dist.destroy_process_group()
