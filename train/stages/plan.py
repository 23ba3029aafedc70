"""The plan stage, with which every run starts. Rank 0 runs it."""

from eagle31.json_files import write_json
from train.config.run import Stage
from train.context import RunContext
from train.plan.plan import Plan, make_plan
from train.plan.table import format_plan, hours_lines, work_lines
from train.plan.work import newest_data_summary

PLAN = "plan.json"


def announce_plan(context: RunContext) -> None:
    """Print the plan and write it to the output directory."""
    print(format_plan(_write_plan(context)), flush=True)


def announce_work(context: RunContext) -> None:
    """Update the plan with the number of tokens, which is known once the data is tokenized, and print it."""
    plan = _write_plan(context)
    lines = [*work_lines(plan.work), *hours_lines(plan.first.hours)]
    print("plan: " + "; ".join(f"{name} {value}" for name, value in lines), flush=True)


def _write_plan(context: RunContext) -> Plan:
    data = context.artifacts.get(Stage.data)
    summary = newest_data_summary(context.output_dir) if data is None else data.summary
    plan = make_plan(context.config, context.world, summary)
    write_json(context.output_dir / PLAN, plan.to_json())
    return plan
