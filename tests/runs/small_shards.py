"""train/main.py with small shards and batches, of which a small run then has several.

The rank KILLED_RANK is killed in its training step KILLED_AT, counted from 0 in this process.
"""

import itertools
import os
import runpy
import signal
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    from train.stages import capture
    from train.trainer import train

    if os.environ.get("KILLED_RANK") == os.environ["RANK"]:
        step, numbers = train.optimizer_step, itertools.count()

        def killed(*args: Any, **kwargs: Any) -> Any:
            if next(numbers) == int(os.environ["KILLED_AT"]):
                os.kill(os.getpid(), signal.SIGKILL)
            return step(*args, **kwargs)

        train.optimizer_step = killed
    capture.SHARD_TOKENS, capture.BATCH_TOKENS = 1500, 1024
    runpy.run_path(str(ROOT / "train/main.py"), run_name="__main__")
