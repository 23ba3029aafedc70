"""Ranks of the data stage whose blocks are small: answering_worker.py KILLED_BLOCK ARGUMENTS

The rank that answers this block dies in it without a word.
"""

import os
import signal
import sys
from pathlib import Path
from typing import Any, cast

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from data.generation import hf
from data.generation.regenerate import regenerate
from train.config.compose import composed
from train.distributed import World, leave_ranks
from train.pipeline import run_pipeline

cast("dict", regenerate.__kwdefaults__)["block_turns"] = 8
generate_batch = hf.generate_batch


def watched(model: Any, prompts: Any, sampling: Any, number: tuple[int, ...]) -> list[list[int]]:
    os.write(1, f"rank {os.environ['RANK']} answers block {number[0]}\n".encode())
    if number[0] == int(sys.argv[1]) and number[1]:
        os.kill(os.getpid(), signal.SIGKILL)
    return generate_batch(model, prompts, sampling, number)


hf.generate_batch = watched
run_pipeline(composed(sys.argv[2:]), World.from_environment())
leave_ranks(World.from_environment())
