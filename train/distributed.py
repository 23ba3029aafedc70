"""Who this process is among the run's processes, and waiting without a process group."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

POLL_SECONDS = 0.5


@dataclass(frozen=True)
class World:
    """From torchrun's environment; one process without it."""

    rank: int
    local_rank: int
    size: int

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def device(self) -> torch.device:
        if torch.cuda.is_available():
            return torch.device("cuda", self.local_rank)
        return torch.device("cpu")

    @staticmethod
    def from_environment() -> "World":
        return World(
            rank=int(os.environ.get("RANK", 0)),
            local_rank=int(os.environ.get("LOCAL_RANK", 0)),
            size=int(os.environ.get("WORLD_SIZE", 1)),
        )


def wait_for(path: Path) -> None:
    """Blocks until a file exists.

    Other ranks wait so for what rank 0 prepares: no process group exists yet that could time out, and
    torchrun ends everybody when rank 0 fails.
    """
    while not path.exists():
        time.sleep(POLL_SECONDS)


def sum_over_ranks(value: Tensor) -> Tensor:
    """In place; the value itself without a process group."""
    if dist.is_initialized():
        dist.all_reduce(value)
    return value


def on_main_first(is_main: bool, action: Callable[[], None]) -> None:
    """Rank 0 acts, everybody meets behind it."""
    if is_main:
        action()
    if dist.is_initialized():
        dist.barrier()


def leave_process_group() -> None:
    """Lets go of it, where there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()
