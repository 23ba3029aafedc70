"""The plan of a run: what it takes, by the settings at first, and by its data once that is there."""

from collections.abc import Sequence
from dataclasses import asdict

from eagle31.json_files import write_json
from train.config.run import Stage
from train.context import RunContext
from train.plan.plan import Plan, make_plan
from train.plan.table import hours_lines, work_lines
from train.plan.work import data_summary
from train.stages.train import check_rows


def write_plan(context: RunContext, given: Sequence[str] = ()) -> Plan:
    """Write the plan to the output directory, with what its data is known to have."""
    data = context.artifacts.get(Stage.data)
    summary = data_summary(context.config) if data is None else data.summary
    plan = make_plan(context.config, context.world, summary, given)
    write_json(context.output_dir / "plan.json", asdict(plan))
    return plan


def check_amounts(context: RunContext) -> None:
    """Print what the run takes, now that the number of tokens is known, and check that it can train on them.

    Raises:
        UserError: they do not fill the rows of a step.
    """
    if Stage.data.value not in context.reused:
        plan = write_plan(context)
        lines = [*work_lines(plan.work), *hours_lines(plan.first.hours)]
        print("plan: " + "; ".join(f"{name} {value}" for name, value in lines), flush=True)
    if Stage.train in context.config.stages:
        check_rows(context.config, context.artifacts[Stage.data])
