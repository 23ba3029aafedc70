"""What a run takes once its data is there."""

from train.config.run import Stage
from train.context import RunContext
from train.plan.plan import make_plan
from train.plan.table import hours_lines, work_lines
from train.stages.train import check_rows


def check_amounts(context: RunContext) -> None:
    """Print what the run takes, now that the number of tokens is known, and check that it can train on them.

    Raises:
        UserError: they do not fill the rows of a step.
    """
    if Stage.data.value not in context.reused:
        plan = make_plan(context.config, context.world)
        lines = [*work_lines(plan.work), *hours_lines(plan.first.hours)]
        print("plan: " + "; ".join(f"{name} {value}" for name, value in lines), flush=True)
    if Stage.train in context.config.stages:
        check_rows(context.config, context.artifacts[Stage.data])
