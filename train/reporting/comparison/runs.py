"""The runs of a comparison: which of them can be compared, and in which settings they differ."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from eagle31.errors import UserError
from train.reporting.results import read_report

MAX_RUNS = 8  # as many as have colors and markers that can be told apart
# They say where a run was, not what it did; stages are a choice of a start and not of a run.
_LEFT_OUT = ("output_dir", "cache_dir", "stages", "plan.", "hub.", "tracking.")
_MISSING = ""


@dataclass(frozen=True)
class Run:
    """One run's report."""

    name: str
    directory: Path
    evaluation: dict[str, Any]
    info: dict[str, Any]
    metrics: list[dict[str, Any]]
    settings: dict[str, str]  # of config.yaml by dotted name; empty where the run's directory has none

    @property
    def target(self) -> str:
        return str(self.info.get("target_fingerprint") or self.info["target"])


def read_runs(directories: Sequence[Path]) -> list[Run]:
    """Read the reports of the runs.

    Raises:
        UserError: there are too few or too many, one is given twice, has no report, or was not evaluated.
    """
    if len(directories) < 2:
        shown = " ".join(map(str, directories))
        raise UserError("RUN", shown, "Give the output directories of at least two runs.")
    if len(directories) > MAX_RUNS:
        raise UserError("RUN", len(directories), f"Compare at most {MAX_RUNS} runs at a time.")
    resolved = [path.resolve() for path in directories]
    for path in resolved:
        if resolved.count(path) > 1:
            raise UserError("RUN", path, "It is given twice.")
    return [_read(path, name) for path, name in zip(directories, _names(resolved), strict=True)]


def _read(directory: Path, name: str) -> Run:
    known = read_report(directory)
    if not known["evaluation"]:
        raise UserError(
            "RUN", directory, "It was not evaluated; run its recipe with stages=[evaluate,report]."
        )
    config = directory / "config.yaml"
    settings = dict(_leaves(yaml.safe_load(config.read_text(encoding="utf-8")))) if config.exists() else {}
    return Run(name, directory, known["evaluation"], known["run"], known["metrics"], settings)


def _names(paths: Sequence[Path]) -> list[str]:
    """Return the shortest ends of the paths that differ, of the same number of parts."""
    for num_parts in range(1, max(len(path.parts) for path in paths) + 1):
        names = ["/".join(path.parts[-num_parts:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    return [str(path) for path in paths]


def _leaves(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, dict) and value:
        for key, one in value.items():
            yield from _leaves(one, f"{name}.{key}" if name else str(key))
    elif not name.startswith(_LEFT_OUT):
        yield name, "none" if value is None else str(value)


def why_not_comparable(run: Run, reference: Run) -> str | None:
    """Return why a run's acceptance lengths cannot be compared with the reference's; None if they can."""
    mine, theirs = (one.evaluation["trained"].get("prompts_hash") for one in (run, reference))
    if run.target != reference.target:
        return f"another target: {run.info['target']} instead of {reference.info['target']}"
    if mine is None or theirs is None:
        lacking = run if mine is None else reference
        return (
            f"the report of {lacking.name} does not say which prompts it has; run its recipe again with "
            "stages=[evaluate,report]"
        )
    limits = [one.evaluation["max_new_tokens"] for one in (run, reference)]
    if limits[0] != limits[1]:
        return f"completions of up to {limits[0]} tokens instead of {limits[1]}"
    if mine != theirs:
        numbers = [one.evaluation["num_prompts"] for one in (run, reference)]
        if numbers[0] != numbers[1]:
            return f"other prompts: {numbers[0]} instead of {numbers[1]}"
        return f"{numbers[0]} other prompts"
    return None


def comparable(runs: Sequence[Run]) -> tuple[list[Run], dict[str, str]]:
    """Return the runs that can be compared with the first one, itself included, and why not the others."""
    reasons = {run.name: why_not_comparable(run, runs[0]) for run in runs[1:]}
    refused = {name: reason for name, reason in reasons.items() if reason is not None}
    return [run for run in runs if run.name not in refused], refused


def different_settings(runs: Sequence[Run]) -> list[list[str]]:
    """Return a header and a row for each setting in which the runs differ."""
    facts = [_facts(run) | run.settings for run in runs]
    names = dict.fromkeys(name for one in facts for name in one)
    rows = [["setting", *(run.name for run in runs)]]
    for name in names:
        values = [one.get(name, _MISSING) for one in facts]
        if len(set(values)) > 1:
            rows.append([name, *values])
    return rows


def _facts(run: Run) -> dict[str, str]:
    """Return what a run found out and no setting says."""
    info = run.info
    return {
        "recipe": str(info["recipe"]),
        "drafter parameters": f"{info['drafter_parameters']:,}",
        "aux layer ids": ", ".join(map(str, info["aux_layer_ids"])),
        "samples": f"{info['num_samples']:,}",
        "optimizer steps": f"{info['steps']:,}",
        "exported step": _MISSING if info["best_step"] is None else f"{info['best_step']:,}",
        "git revision": str(info["git_revision"])[:10],
    }
