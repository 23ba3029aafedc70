"""The processes of a run: ranks, sums over them, and waiting without a process group."""

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
    """This process's place among the processes of the run."""

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
        """Read torchrun's environment variables; without them the run is one process."""
        return World(
            rank=int(os.environ.get("RANK", 0)),
            local_rank=int(os.environ.get("LOCAL_RANK", 0)),
            size=int(os.environ.get("WORLD_SIZE", 1)),
        )


def wait_for(path: Path) -> None:
    """Block until a file exists.

    The other ranks wait this way for what rank 0 prepares: there is no process group yet that could time out,
    and torchrun ends all ranks when rank 0 fails.
    """
    while not path.exists():
        time.sleep(POLL_SECONDS)


def sum_over_ranks(value: Tensor) -> Tensor:
    """Sum a tensor over all ranks in place, and return it. Every rank calls."""
    if dist.is_initialized():
        dist.all_reduce(value)
    return value


def on_main_first(is_main: bool, action: Callable[[], None]) -> None:
    """Run `action` on rank 0 while the other ranks wait. Every rank calls."""
    if is_main:
        action()
    if dist.is_initialized():
        dist.barrier()


def leave_process_group() -> None:
    """Destroy the process group if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()
