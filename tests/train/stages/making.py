"""Running one stage alone."""

from tests.train.torchrun import composed
from train.config.run import Stage
from train.context import RunContext
from train.distributed import World
from train.pipeline import run_stage, unfinished_stages


def run_stage_alone(stage: Stage, recipe: str, *settings: str) -> RunContext:
    """Run one stage of a run, as the pipeline does in one process, and return the run."""
    context = RunContext(composed(recipe, *settings), World(rank=0, local_rank=0, size=1))
    unfinished_stages(context, [stage])
    run_stage(context, stage, unfinished=True)
    return context
