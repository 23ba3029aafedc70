"""Runs a recipe: torchrun [--nproc-per-node N] train/main.py recipe=NAME [key=value ...]"""

import sys
from pathlib import Path

# torchrun puts this file's folder first; the packages are one above.
sys.path[0] = str(Path(__file__).resolve().parent.parent)
from train.command import pause_collection, prepare, resume_collection, run_command

prepare()
from omegaconf import OmegaConf
from torch.distributed.elastic.multiprocessing.errors import record

from train.config.compose import compose_config, composed, parse_arguments
from train.distributed import World, ending, leave_ranks, made_by_main, watch_ranks
from train.stop import Stopped


@record  # hands an unexpected exception's traceback to torchrun
def main() -> None:
    """Print the configuration, or run its stages."""
    arguments = parse_arguments()
    if arguments.cfg:
        print(OmegaConf.to_yaml(compose_config(arguments.overrides)), end="")
        return
    world = World.from_environment()
    watch_ranks(world)  # if this cannot reach the others, none can be told
    try:
        overrides = made_by_main(lambda: arguments.overrides, world)
        config = composed(overrides)
        # Only now: this import takes seconds, which a mistake in the configuration need not wait for.
        pause_collection()
        from train.pipeline import run_pipeline

        resume_collection()
        run_pipeline(config, world, overrides)
    except Stopped:
        leave_ranks(world)
        raise
    except KeyboardInterrupt:
        if world.is_main:
            print("interrupted; the same command resumes", file=sys.stderr)
        raise
    except Exception as error:
        if (reason := ending(error, world)) is not error:
            raise reason from None
        raise
    # Not after an error: it could wait for ranks that have ended, or fail, and hide that error.
    leave_ranks(world)


if __name__ == "__main__":
    run_command(main)
