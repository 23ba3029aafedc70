"""Runs under torchrun, in a run: rank 2 is killed; rank 0 waits for it, and rank 1 cannot be interrupted."""

import os
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from tests.train.torchrun import composed
from train import supervision
from train.distributed import World, wait_for
from train.lifetime import departures
from train.lifetime.stops import at_safe_points

WAITS, CANNOT_STOP, KILLED = range(3)  # ranks


def main() -> None:
    """Take the output directory from argv."""
    output_dir, world = Path(sys.argv[1]), World.from_environment()
    supervision._TOGETHER_SECONDS = 600.0  # nobody would wait so long
    if world.rank == CANNOT_STOP:
        departures._GRACE_SECONDS = 1.0
    with supervision.supervised(composed("quickstart", f"output_dir={output_dir}"), world):
        if world.rank == KILLED:
            wait_for(output_dir / "rank0")
            wait_for(output_dir / "rank1")
            os.kill(os.getpid(), signal.SIGKILL)
        elif world.rank == CANNOT_STOP:
            with at_safe_points():  # as in an operation of NCCL, which never returns
                (output_dir / "rank1").touch()
                time.sleep(600)
        try:
            (output_dir / "rank0").touch()
            wait_for(output_dir / "never")
        finally:
            print("rank 0 cleans up", flush=True)


if __name__ == "__main__":
    try:
        main()
    finally:
        print(f"rank {os.environ['RANK']} ends by itself", flush=True)
