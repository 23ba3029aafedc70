"""Runs a recipe: torchrun [--nproc-per-node N] train/main.py recipe=NAME [key=value ...]"""

import sys
from pathlib import Path

# torchrun puts this file's folder first; the packages are one above.
sys.path[0] = str(Path(__file__).resolve().parent.parent)
from train.lifetime.held_signals import hold_signals

hold_signals()
from train.command import prepare, run_command
from train.lifetime.launcher import end_with_launcher

end_with_launcher()
prepare()
from omegaconf import OmegaConf
from torch.distributed.elastic.multiprocessing.errors import record

from eagle31.imports import collection_paused
from eagle31.malloc import keep_freed_memory
from train.compose import compose_config, composed, parse_arguments
from train.config.launcher import sets_launcher
from train.config.run import RunConfig
from train.distributed import World
from train.lifetime.stops import at_safe_points, stop_not_replaced
from train.supervision import supervised


def main() -> None:
    """Print the configuration, or run its stages."""
    arguments = parse_arguments()
    if arguments.cfg:
        print(OmegaConf.to_yaml(compose_config(arguments.overrides)), end="")
    else:
        config, world = composed(arguments.overrides), World.from_environment()
        if world.is_main and any(map(sets_launcher, arguments.overrides)):
            print("note: launcher has no effect here; it is for scripts/submit", flush=True)
        run(config, world)


@record  # hands an unexpected exception's traceback to torchrun
def run(config: RunConfig, world: World) -> None:
    """Run the stages of a sound configuration; every rank calls."""
    keep_freed_memory()
    with supervised(config, world):
        # Only now: this import takes seconds, which a mistake in the configuration need not wait for. It is
        # not interrupted, because a library might take that for its own failure.
        with at_safe_points(), collection_paused():
            from train.doctor.failures import explanation
            from train.pipeline import run_pipeline
        try:
            with stop_not_replaced():
                run_pipeline(config, world)
        except Exception as error:
            for line in explanation(error, config, world):
                print(line, file=sys.stderr, flush=True)
            raise


if __name__ == "__main__":
    run_command(main)
