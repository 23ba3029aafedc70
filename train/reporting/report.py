"""The report of a run: an HTML page, pictures, and a table for the terminal."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eagle31.export.layouts import Layout
from eagle31.json_files import read_jsonl, write_sealed_json, write_text
from train.reporting.draft_length import (
    Timing,
    choice_table,
    commands,
    draft_length_panels,
    draft_lengths,
    notes,
    read_step_times,
    step_table,
)
from train.reporting.drift_plots import drift_panels, shown_drift
from train.reporting.model_card import (
    DRAFT_TOKENS,
    describe_samples,
    describe_steps,
    describe_vocabulary,
    serve_command,
    target_name,
    untrained_warning,
)
from train.reporting.page import render_page
from train.reporting.plots import Panel, build_panels, save_png
from train.reporting.results import (
    acceptance_table,
    acceptances,
    at_draft_length,
    describe_conditions,
    details,
    interval_of,
    read_report,
    read_serving,
    summary_rows,
    warnings_of,
)
from train.reporting.speed import training_speed
from train.tables import aligned

# The PNG files and their panels; panels without data are left out.
PICTURES = {
    "loss.png": ("loss",),
    "acceptance_over_training.png": ("agreement", "expected_acceptance", "replay"),
    "draft_length.png": ("draft_length",),
    "acceptance_by_position.png": ("positions",),
    "drift.png": ("drift_attention", "drift_heads", "drift_state", "drift_share"),
}
SUMMARY = ("loss", "replay", "draft_length")


def write_report(
    output_dir: Path, metrics_path: Path, evaluation: dict[str, Any], run_info: dict[str, Any]
) -> Path:
    """Write `output_dir/report`: index.html, PNG pictures, and metrics.json with all their numbers.

    Args:
        metrics_path: the run's metrics.jsonl.
        evaluation: the evaluation's results; parts of it may be missing.
        run_info: describes the run.

    Returns: the path of index.html.
    """
    directory = Path(output_dir) / "report"
    directory.mkdir(parents=True, exist_ok=True)
    metrics = read_jsonl(metrics_path)
    known = {"evaluation": evaluation, "run": run_info, "metrics": metrics}
    write_sealed_json(directory / "metrics.json", known)

    timing = read_step_times(Path(output_dir))
    panels = _panels(metrics, evaluation, run_info)
    for name, chosen in PICTURES.items():
        _save(directory / name, [panels[p] for p in chosen if p in panels])
    summary = [panels[p] for p in SUMMARY if p in panels]
    _save(directory / "summary.png", summary, _headline(evaluation), panel_inches=3.5)

    path = directory / "index.html"
    serving = read_serving(Path(output_dir))
    write_text(path, _page(panels, metrics, evaluation, run_info, serving, timing))
    return path


def refresh_page(output_dir: Path) -> Path:
    """Write index.html again from the report's metrics.json, serving.json and step_times.json.

    Raises:
        UserError: the run has no report yet, or one of another version.
    """
    known = read_report(output_dir)
    evaluation, run_info = known["evaluation"], known["run"]
    panels = _panels(known["metrics"], evaluation, run_info)
    path = Path(output_dir) / "report" / "index.html"
    serving, timing = read_serving(Path(output_dir)), read_step_times(Path(output_dir))
    write_text(path, _page(panels, known["metrics"], evaluation, run_info, serving, timing))
    return path


def format_table(evaluation: dict[str, Any], run_info: dict[str, Any]) -> str:
    """Return the results as a table for the terminal, and the paths of export and report.

    Args:
        run_info: has the paths `export` and `report`.
    """
    lines: list[str] = []
    rows: list[tuple[str, str]] = []
    if evaluation:
        lines += [*aligned(acceptance_table(evaluation), text_columns=2), ""]
        rows = summary_rows(evaluation)
    rows += [(name, str(run_info[name])) for name in ("export", "report") if run_info.get(name)]
    for warning in _warnings(evaluation, run_info):
        lines = [f"WARNING: {warning}", "", *lines]
    return "\n".join(lines + aligned(rows, text_columns=2))


def _panels(
    metrics: Sequence[dict[str, Any]], evaluation: dict[str, Any], run_info: dict[str, Any]
) -> dict[str, Panel]:
    best_step = run_info["best_step"]
    return build_panels(metrics, evaluation, best_step) | drift_panels(metrics, best_step)


def _save(path: Path, panels: Sequence[Panel], headline: str = "", panel_inches: float = 4.6) -> None:
    path.unlink(missing_ok=True)  # the picture of an earlier run would be misleading
    if panels:
        save_png(panels, path, headline, panel_inches)


def _headline(evaluation: dict[str, Any]) -> str:
    if not evaluation:
        return ""
    stats = at_draft_length(evaluation["trained"], evaluation["k"])
    prompts = f"{evaluation['num_prompts']} held-out prompts"
    return f"Acceptance length {stats['acceptance_length']:.2f} at k = {stats['k']}, temperature 0, {prompts}"


def _page(
    panels: dict[str, Panel],
    metrics: Sequence[dict[str, Any]],
    evaluation: dict[str, Any],
    run_info: dict[str, Any],
    serving: dict[str, Any] | None,
    timing: Timing | None,
) -> str:
    chosen = draft_lengths(evaluation, timing) if timing else []
    chosen_panels = draft_length_panels(chosen)
    return render_page(
        "report.html",
        panels | chosen_panels,
        evaluation=evaluation,
        headlines=_headlines(evaluation),
        warnings=_warnings(evaluation, run_info),
        acceptance_table=acceptance_table(evaluation),
        details=details(evaluation) if evaluation else [],
        conditions=describe_conditions(evaluation) if evaluation else "",
        measured=acceptances(evaluation),
        num_positions=_num_positions(evaluation),
        run_info=run_info,
        drift=shown_drift(metrics, run_info["best_step"]),
        serving=serving,
        timing=timing,
        draft_lengths=chosen,
        draft_length_figures=list(chosen_panels),
        choice_table=choice_table(chosen),
        step_table=step_table(timing) if timing else [],
        timing_notes=notes(chosen, timing) if timing else [],
        draft_length_commands=commands(chosen, run_info),
        title=target_name(run_info),
        configuration=_configuration(run_info) + training_speed(metrics),
        total_seconds=sum(stage["seconds"] for stage in run_info["stages"] if not stage["reused"]),
        serve=serve_command(
            str(run_info["target"]),
            str(run_info["export"]),
            evaluation.get("k", DRAFT_TOKENS),
            run_info.get("layout", Layout.vllm.value),
        ),
    )


def _headlines(evaluation: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Return (number, name, comparison) of the figures at the top of the page."""
    if not evaluation:
        return []
    k, decoding = evaluation["k"], evaluation["decoding"]
    stats, longest = (
        at_draft_length(evaluation["trained"], length) for length in (k, _num_positions(evaluation))
    )
    scale = f"95 % interval {interval_of(stats)}, perfect {k + 1}"
    if evaluation.get("untrained"):
        untrained = at_draft_length(evaluation["untrained"], k)
        scale += f", untrained {untrained['acceptance_length']:.2f}"
    found = [(f"{stats['acceptance_length']:.2f}", f"acceptance length at k = {k}", scale)]
    if longest["k"] != k:
        scale = f"95 % interval {interval_of(longest)}, perfect {longest['k'] + 1}"
        found.append(
            (f"{longest['acceptance_length']:.2f}", f"acceptance length at k = {longest['k']}", scale)
        )
    timing = decoding["timing"]
    if timing["speedup"] is None:
        found.append(("not known", "speed-up", timing["unknown"]))
    else:
        note = f"median of {timing['num_prompts']} prompts, 95 % interval {interval_of(timing)}"
        found.append((f"{timing['speedup']:.2f}×", "speed-up", note))
    completions = decoding["completions"]
    rest = f"{completions['num_near_tie']} near-tie, {completions['num_different']} different"
    identical = f"{completions['num_identical']}/{decoding['num_prompts']}"
    found.append((identical, "completions identical to the target's", rest))
    return found


def _num_positions(evaluation: dict[str, Any]) -> int:
    """Return the length of the longest drafts."""
    return max((one.longest["k"] for one in acceptances(evaluation)), default=0)


def _warnings(evaluation: dict[str, Any], run_info: dict[str, Any]) -> list[str]:
    untrained = untrained_warning(run_info)
    return ([untrained] if untrained else []) + (warnings_of(evaluation) if evaluation else [])


def _configuration(run_info: dict[str, Any]) -> list[tuple[str, str]]:
    rows = [
        ("recipe", run_info["recipe"]),
        ("target", run_info["target"]),
        ("training data", run_info["train_data"]),
        ("trained on", describe_samples(run_info)),
        ("optimizer steps", describe_steps(run_info)),
        ("drafter", f"{run_info['drafter_parameters']:,} parameters"),
        ("aux layer ids", ", ".join(map(str, run_info["aux_layer_ids"])) + " (decoder layers applied)"),
        ("draft vocabulary", describe_vocabulary(run_info)),
        ("export", run_info["export"]),
        ("git revision", run_info["git_revision"]),
        (
            "versions",
            ", ".join(f"{name} {version}" for name, version in sorted(run_info["versions"].items())),
        ),
    ]
    return [(name, str(value)) for name, value in rows if value is not None]
