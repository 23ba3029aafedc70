"""train/main.py with small shards and batches, of which a small run then has several."""

import runpy
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    from train.stages import capture

    capture.SHARD_TOKENS, capture.BATCH_TOKENS = 1500, 1024
    runpy.run_path(str(ROOT / "train/main.py"), run_name="__main__")
