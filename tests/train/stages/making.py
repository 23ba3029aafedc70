"""Running one stage alone."""

from train.config.run import Stage
from train.context import RunContext
from train.pipeline import STAGES, begin_stage


def make_result(context: RunContext, stage: Stage) -> None:
    """Run one stage, as the pipeline does in one process, and finish its result."""
    begin_stage(context, stage)
    artifact = context.artifacts[stage]
    artifact.finish(0.0, STAGES[stage].run(context, artifact.directory))
