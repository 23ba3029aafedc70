"""Ranks of which one, RANK, gets a signal, NAME, and says nothing more: lost_rank_worker.py RANK NAME"""

import os
import signal
import sys
import time

from train import distributed
from train.distributed import World, wait_for_ranks, watch_ranks

distributed.BEAT_SECONDS, distributed.SILENT_SECONDS = 0.2, 2.0
world = World.from_environment()
watch_ranks(world)
wait_for_ranks(world)
time.sleep(1.0)
print("seen", flush=True)  # by rank 0, several times
if world.rank == int(sys.argv[1]):
    os.kill(os.getpid(), signal.Signals[sys.argv[2]])
time.sleep(120)  # as in a collective
