"""torchrun [--nproc-per-node N] train/main.py recipe=NAME [key=value ...]"""

import sys
from pathlib import Path

# torchrun puts this file's folder first; the packages live one above.
sys.path[0] = str(Path(__file__).resolve().parent.parent)

import hydra
from omegaconf import DictConfig, MissingMandatoryValue, OmegaConf
from torch.distributed.elastic.multiprocessing.errors import record

from eagle31.errors import UserError
from eagle31.malloc import keep_freed_memory
from train.config.overrides import checked
from train.config.run import RunConfig, check, register
from train.distributed import World, leave_process_group


@record
def run(config: RunConfig) -> None:
    """Checks the recipe and runs its stages."""
    try:
        check(config)
        # Not before the recipe is known to be sound: it takes seconds to import.
        from train.pipeline import run_pipeline

        run_pipeline(config, World.from_environment())
    except UserError as error:
        # A traceback would bury what the user can put right, and `record` keeps one of any other exception.
        sys.exit(f"error: {error}")
    finally:
        leave_process_group()


@hydra.main(version_base="1.3", config_path="../recipes", config_name="train")
def main(config: DictConfig) -> None:
    try:
        run(OmegaConf.to_object(config))  # type: ignore[arg-type]
    except MissingMandatoryValue as error:
        sys.exit(f"error: {error.full_key}=???: This recipe needs a value for it: {error.full_key}=...")


if __name__ == "__main__":
    try:
        sys.argv[1:] = checked(sys.argv[1:])
    except UserError as error:
        sys.exit(f"error: {error}")
    keep_freed_memory()
    register()
    main()
