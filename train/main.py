"""torchrun [--nproc-per-node N] train/main.py recipe=NAME [key=value ...]"""

import sys
from pathlib import Path

# torchrun puts this file's folder first; the packages live one above.
sys.path[0] = str(Path(__file__).resolve().parent.parent)

import hydra
from omegaconf import DictConfig, OmegaConf
from torch.distributed.elastic.multiprocessing.errors import record

from eagle31.errors import UserError
from train.config import RunConfig, check, register
from train.distributed import World, leave_process_group

register()


@record
def run(config: RunConfig) -> None:
    """Checks the recipe and runs its stages."""
    # Not before the recipe is known to be well-formed: it takes seconds to import.
    from train.pipeline import run_pipeline

    world = World.from_environment()
    try:
        check(config)
        run_pipeline(config, world)
    except UserError as error:
        # A traceback would bury what the user can put right.
        sys.exit(f"error: {error}")
    finally:
        leave_process_group()


@hydra.main(version_base="1.3", config_path="../recipes", config_name="train")
def main(config: DictConfig) -> None:
    run(OmegaConf.to_object(config))  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
