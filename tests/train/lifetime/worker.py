"""Runs under torchrun: one rank comes late to a wait for all ranks, and not to a collective operation.

With "crossed" the ranks wait for each other instead.
"""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from train.distributed import World, connected_values, wait_for_ranks
from train.lifetime.activity import ACTIVITY
from train.lifetime.watch import RankWatch

LATE = 1  # the rank that sleeps


def sleep_here() -> None:
    time.sleep(600)


def main() -> None:
    """Take the limit in seconds and the directory of the stacks from argv."""
    limit, directory, world = float(sys.argv[1]), Path(sys.argv[2]), World.from_environment()
    crossed = sys.argv[3:] == ["crossed"]

    def stop(reason: str) -> None:
        print(f"rank {world.rank}: stop: {reason}", flush=True)

    def fail(message: str) -> int:
        (directory / f"failed-{world.rank}").write_text(message)
        return 7

    with RankWatch(
        connected_values(),
        world.rank,
        world.size,
        limit_seconds=limit,
        directory=directory,
        stop=stop,
        fail=fail,
    ) as watch:
        if world.rank == LATE and not crossed:
            watch.tell_stop("a test")
        # Nobody limits this wait, but the rank that is late is named.
        if world.rank == LATE and not crossed:
            time.sleep(limit / 2)
        wait_for_ranks("begun", world)
        dist.init_process_group("gloo")
        dist.barrier()
        ACTIVITY.enter("train")
        ACTIVITY.step = 3
        if crossed:
            dist.broadcast(torch.zeros(1), src=1 - world.rank)
        elif world.rank == LATE:
            sleep_here()
        dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
