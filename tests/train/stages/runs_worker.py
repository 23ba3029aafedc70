"""Runs under torchrun: several configurations one after the other, which share the imports of one process."""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from eagle31.errors import UserError
from train.config.compose import composed
from train.distributed import World, leave_ranks
from train.pipeline import run_pipeline


def main() -> None:
    """Run each list of arguments in the file of argv; print a line before each, and what is refused."""
    for name, arguments in json.loads(Path(sys.argv[1]).read_text()).items():
        print(f"=== {name}", flush=True)
        try:
            run_pipeline(composed(arguments), World.from_environment())
        except UserError as error:
            print(f"refused: {error}", flush=True)
    leave_ranks(World.from_environment())


if __name__ == "__main__":
    main()
