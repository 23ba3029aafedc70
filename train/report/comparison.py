"""Runs side by side: which drafter is better."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from train.artifact import dotted
from train.evaluation.intervals import Interval, length_of, paired_ratio
from train.report.results import Acceptance, Report, acceptances, read_report
from train.tables import aligned

# They say where a run was, not what it did.
_LEFT_OUT = ("output_dir", "artifacts_dir", "stages", "plan.")


@dataclass(frozen=True)
class Run:
    """One run."""

    name: str
    report: Report
    settings: dict[str, str]  # by dotted name


def read_runs(directories: Sequence[Path]) -> list[Run]:
    """Read the reports of the runs.

    Raises:
        UserError: one has no report.
    """
    runs = []
    for directory in directories:
        report = read_report(directory)
        settings = {
            name: "none" if value is None else str(value)
            for name, value in dotted(report.run.get("settings", {}))
            if not name.startswith(_LEFT_OUT)
        }
        runs.append(Run(str(directory), report, settings))
    return runs


def why_not_comparable(run: Run, reference: Run) -> str | None:
    """Return why a run's acceptance lengths cannot be compared with the reference's; None if they can."""
    ours, theirs = run.report, reference.report
    if ours.run["target_fingerprint"] != theirs.run["target_fingerprint"]:
        return "another target"
    if ours.evaluation["trained"]["texts_hash"] != theirs.evaluation["trained"]["texts_hash"]:
        return "other prompts or completions"
    return None


def comparison_lines(runs: Sequence[Run]) -> list[str]:
    """Return the table for the terminal: a column for each run, the first of which is the reference."""
    columns = [
        _acceptance_rows(run, runs[0])
        | _training_rows(run)
        | {name: value for name, value in run.settings.items() if value != _common(runs, name)}
        for run in runs
    ]
    rows = [["", *(f"run {number}" for number in range(1, len(runs) + 1))]]
    for name in dict.fromkeys(name for one in columns for name in one):
        rows.append([name, *(one.get(name, "") for one in columns)])
    lines = [f"run {number}: {run.name}" for number, run in enumerate(runs, start=1)]
    refused = [
        f"WARNING: run {number} is not compared with run 1: {reason}"
        for number, run in enumerate(runs, start=1)
        if (reason := why_not_comparable(run, runs[0])) is not None
    ]
    note = (
        "Acceptance lengths of greedy drafts with 95 % intervals over prompts. In square brackets: times "
        "that of run 1, with the interval of the ratio over the same prompts."
    )
    return [*lines, *refused, "", *aligned(rows), "", note]


def _acceptance_rows(run: Run, reference: Run) -> dict[str, str]:
    """Return acceptance lengths by temperature and draft length, with ratios to the reference."""
    found = {}
    compared = run is not reference and why_not_comparable(run, reference) is None
    others = {one.measured["texts_hash"]: one.measured for one in _greedy(reference) if compared}
    for one in _greedy(run):
        # Sampled completions differ with the seed, for example, and then have no counterpart.
        other = others.get(one.measured["texts_hash"])
        for index, row in enumerate(one.measured["by_draft_length"]):
            text = length_of(row).shown()
            if other is not None and index < len(other["by_draft_length"]):
                text += f" [{paired_ratio(one.measured, other, index).shown('x')}]"
            found[f"temperature {one.temperature:g}, k = {row['k']}"] = text
    return found


def _greedy(run: Run) -> list[Acceptance]:
    return [
        one
        for one in acceptances(run.report.evaluation)
        if (one.drafter, one.drafts) == ("trained", "greedy")
    ]


def _training_rows(run: Run) -> dict[str, str]:
    info = run.report.run
    seconds = [one["seconds"] for one in run.report.metrics if one["kind"] == "train"]
    speedups = {
        f"speed-up, users = {row['concurrency']}, k = {row['k']}": Interval(**row["speedup"]).shown("x")
        for row in (run.report.serving or {"rows": []})["rows"]
    }
    return speedups | {
        "steps, exported": f"{info['steps']:,}, {info['best_step']:,}",
        "minutes of training": f"{sum(seconds) / 60:.1f}",
        "samples": f"{info['num_samples']:,}",
        "drafter parameters": f"{info['drafter_parameters']:,}",
    }


def _common(runs: Sequence[Run], name: str) -> str | None:
    """Return the value of a setting that all runs have; None where they differ."""
    values = {run.settings.get(name) for run in runs}
    return values.pop() if len(values) == 1 else None
