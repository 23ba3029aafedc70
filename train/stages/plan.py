"""The plan stage: every run starts with it."""

from eagle31.json_files import write_json
from train.context import RunContext
from train.planning.plan import make_plan
from train.planning.table import format_plan, work_lines

PLAN = "plan.json"


def announce_plan(context: RunContext) -> None:
    """Prints the plan and writes it into the output directory."""
    plan = make_plan(context)
    print(format_plan(plan), flush=True)
    write_json(context.output_dir / PLAN, plan.to_json())


def announce_work(context: RunContext) -> None:
    """The same once the data is tokenised: prints what that changes."""
    plan = make_plan(context)
    print("plan: " + "; ".join(f"{name} {value}" for name, value in work_lines(plan.work)), flush=True)
    write_json(context.output_dir / PLAN, plan.to_json())
