"""The report of a run: an HTML page and a picture."""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from data.progress import format_seconds
from eagle31.json_files import read_jsonl, write_json, write_text
from train.evaluation.agreement import describe_counts
from train.evaluation.intervals import Interval, length_of
from train.report.card import serve_command, target_name
from train.report.plots import run_panels, save_png, shown_drift, svg_uri
from train.report.results import (
    acceptance_table,
    at_draft_length,
    describe_conditions,
    describe_serving,
    details,
    fastest,
    headline,
    read_report,
    served_length,
    speed_table,
    training_facts,
    warnings_of,
)
from train.tables import counted
from train.templates import template

TEMPLATES = Path(__file__).parent / "templates"
_SUMMARY = ("loss", "replay", "draft_length")


def write_report(
    output_dir: Path, metrics_path: Path, evaluation: dict[str, Any], run_info: dict[str, Any]
) -> Path:
    """Write `output_dir/report`: index.html, summary.png, and metrics.json with all their numbers.

    Args:
        metrics_path: the run's metrics.jsonl.
        evaluation: the evaluation's results.
        run_info: describes the run.

    Returns: the path of index.html.
    """
    known = {"evaluation": evaluation, "run": run_info, "metrics": read_jsonl(metrics_path)}
    write_json(Path(output_dir) / "report" / "metrics.json", known)
    return write_page(output_dir)


def write_page(output_dir: Path) -> Path:
    """Write index.html and summary.png from the report's metrics.json and serving.json.

    Raises:
        UserError: the run has no report yet.
    """
    report = read_report(output_dir)
    metrics, evaluation, run_info, serving = report.metrics, report.evaluation, report.run, report.serving
    best_step = run_info["best_step"]
    directory, panels = Path(output_dir) / "report", run_panels(metrics, evaluation, best_step)
    if summary := [panels[name] for name in _SUMMARY if name in panels]:
        save_png(summary, directory / "summary.png", headline(evaluation), panel_inches=4.0)
    k, choice = served_length(evaluation, serving)
    page = template(TEMPLATES / "report.html", autoescape=True).render(
        figures={name: (panel, svg_uri(panel)) for name, panel in panels.items()},
        evaluation=evaluation,
        headlines=_headlines(evaluation, serving),
        warnings=warnings_of(evaluation, run_info),
        acceptance_table=acceptance_table(evaluation),
        details=details(evaluation),
        conditions=describe_conditions(evaluation),
        drift=shown_drift(metrics, best_step),
        speed_table=speed_table(serving) if serving else None,
        speed_conditions=describe_serving(serving) if serving else "",
        title=target_name(run_info),
        configuration=[
            ("target", run_info["target"]),
            ("training data", ", ".join(run_info["train_data"])),
            *training_facts(run_info),
            ("export", run_info["export"]),
            ("versions", ", ".join(f"{name} {one}" for name, one in sorted(run_info["versions"].items()))),
            *training_speed(metrics),
        ],
        times=[
            ("stage", "time"),
            *((stage["name"], format_seconds(stage["seconds"])) for stage in run_info["stages"]),
            ("all stages", format_seconds(sum(stage["seconds"] for stage in run_info["stages"]))),
        ],
        serve=serve_command(
            run_info,
            k,
            run_info["layout"],
            run_info["method"],
            on_cpu=run_info["device"] == "cpu" and run_info["method"] == "eagle3",
        ),
        choice=choice,
    )
    write_text(directory / "index.html", page)
    return directory / "index.html"


def _headlines(evaluation: dict[str, Any], serving: dict[str, Any] | None) -> list[tuple[str, str, str]]:
    """Return (number, name, comparison) of the figures at the top of the page."""
    found: list[tuple[str, str, str]] = []
    trained, decoding = evaluation["trained"], evaluation["decoding"]
    for k in dict.fromkeys([evaluation["k"], trained["by_draft_length"][-1]["k"]]):
        stats = at_draft_length(trained, k)
        scale = f"95 % interval {length_of(stats).bounds}, perfect {k + 1}"
        if not found:
            untrained = at_draft_length(evaluation["untrained"], k)
            scale += f", untrained {untrained['acceptance_length']:.2f}"
        found.append((f"{stats['acceptance_length']:.2f}", f"acceptance length at k = {k}", scale))
    if serving:
        row = fastest(serving)
        speedup = Interval(**row["speedup"])
        name = f"speed-up in vLLM for {counted(row['concurrency'], 'user')}, k = {row['k']}"
        note = f"95 % interval {speedup.bounds}"
        found.append((f"{speedup.value:.2f}×", name, note))
    completions = decoding["completions"]
    rest = describe_counts(completions).partition(", ")[2]
    identical = f"{completions['num_identical']}/{decoding['num_prompts']}"
    return [*found, (identical, "completions identical to the target's", rest)]


def training_speed(metrics: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
    """Return names and values of training's speed and memory; what a run did not log is left out."""
    train = [record for record in metrics if record["kind"] == "train"]

    def values(name: str) -> list[float]:
        return [record[name] for record in train if name in record]

    found = []
    if rates := values("supervised_positions_per_second"):
        tokens, supervised = statistics.median(values("tokens_per_second")), statistics.median(rates)
        counts = f"{tokens:,.0f} tokens and {supervised:,.0f} supervised positions per second"
        found.append(("training speed", f"{counts}, without padding"))
    if used := values("model_flops_utilization"):
        found.append(("model FLOPs utilization", f"{statistics.median(used):.0%} of the peak bf16 rate"))
    if peaks := values("peak_memory_gb"):
        planned = values("planned_memory_gb")[-1]
        found.append(("peak GPU memory", f"{max(peaks):.1f} GB; the plan's figure is {planned:.1f} GB"))
    if checkpoints := values("checkpoint_seconds"):
        validations = sum(r["seconds"] for r in metrics if r["kind"] == "validation" and "seconds" in r)
        rest = f"validation {validations:.1f} s, checkpoints {sum(checkpoints):.1f} s"
        found.append(("time outside steps", rest))
    return found
