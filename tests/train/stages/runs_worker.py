"""Runs under torchrun: several configurations one after the other, which share the imports of one process."""

import json
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from eagle31.errors import UserError
from train.config.compose import composed
from train.distributed import World, leave_process_group
from train.pipeline import run_pipeline


def main() -> None:
    """Run each list of arguments in the file of argv; print a line before each, and what is refused.

    Instead of arguments there may be a directory next to the file to copy, and patterns of what is left out.
    """
    file = Path(sys.argv[1])
    for name, arguments in json.loads(file.read_text()).items():
        print(f"=== {name}", flush=True)
        if isinstance(arguments, dict):
            copy = shutil.copytree(
                file.parent / arguments["copy"], file.parent / arguments["to"], symlinks=True
            )
            for path in [path for pattern in arguments["without"] for path in copy.glob(pattern)]:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            continue
        try:
            run_pipeline(composed(arguments), World.from_environment())
        except UserError as error:
            print(f"refused: {error}", flush=True)
    leave_process_group()


if __name__ == "__main__":
    main()
