"""The process group that the ranks train in, and the groups of ranks that share rows."""

import os
from datetime import timedelta
from typing import NamedTuple

import deepspeed
import torch
import torch.distributed as dist

from train.distributed import World

# How long a rank may hold up the others: longer than a checkpoint to a slow disk takes.
TIMEOUT_MINUTES = 30.0


def ensure_process_group(wait_seconds: float = 0.0) -> None:
    """Initializes DeepSpeed's process group on nccl or gloo; a single process needs no torchrun.

    Args:
        wait_seconds: how long a rank may wait for states while the others wait for it.
    """
    timeout = _timeout(wait_seconds)
    # At the time limit PyTorch's flight recorder writes which operations each rank has begun.
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    if not torch.cuda.is_available():
        # DeepSpeed uses it for inference only and would compile it for over a minute at its first start.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if World.from_environment().num_nodes == 1:
        # Otherwise gloo listens at the address of the host's name, where other machines reach it.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    alone = "RANK" not in os.environ
    if alone:
        os.environ["LOCAL_RANK"] = "0"  # DeepSpeed requires it
    if not dist.is_initialized():
        if alone:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
        deepspeed.init_distributed(dist_backend=backend, auto_mpi_discovery=False, timeout=timeout)


class RowGroups(NamedTuple):
    """The ranks that share rows with this one."""

    on_device: dist.ProcessGroup
    on_host: dist.ProcessGroup


def row_groups(row_ranks: int, wait_seconds: float = 0.0) -> RowGroups | None:
    """Divide the ranks into groups that share rows; None where each has its own. Every rank calls.

    Args:
        wait_seconds: that of `ensure_process_group`.
    """
    if row_ranks == 1:
        return None
    groups = (
        dist.new_subgroups(row_ranks, backend=backend, timeout=_timeout(wait_seconds))[0]
        for backend in (dist.get_backend(), "gloo")
    )
    return RowGroups(*groups)


def _timeout(wait_seconds: float) -> timedelta:
    return timedelta(minutes=TIMEOUT_MINUTES, seconds=wait_seconds)
