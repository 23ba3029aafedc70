"""The report of a run: an HTML page, pictures, and a table for the terminal."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from eagle31.errors import UserError
from eagle31.export.layouts import Layout
from eagle31.json_files import read_json, read_jsonl, write_json, write_text
from train.reporting.colors import COLORS
from train.reporting.model_card import (
    DRAFT_TOKENS,
    describe_samples,
    describe_steps,
    describe_vocabulary,
    serve_command,
    target_name,
    untrained_warning,
)
from train.reporting.plots import Panel, build_panels, save_png, to_svg
from train.reporting.results import decoding_runs, identical_completions, read_serving
from train.reporting.speed import training_speed
from train.tables import aligned

# The PNG files and their panels; panels without data are left out.
PICTURES = {
    "loss.png": ("loss",),
    "acceptance_over_training.png": ("agreement", "expected_acceptance", "replay"),
    "draft_length.png": ("draft_length",),
    "acceptance_by_position.png": ("positions",),
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
    write_json(directory / "metrics.json", {"evaluation": evaluation, "run": run_info, "metrics": metrics})

    panels = build_panels(metrics, evaluation, run_info["best_step"])
    for name, chosen in PICTURES.items():
        _save(directory / name, [panels[p] for p in chosen if p in panels])
    summary = [panels[p] for p in SUMMARY if p in panels]
    _save(directory / "summary.png", summary, _headline(evaluation), panel_inches=3.5)

    path = directory / "index.html"
    write_text(path, _page(panels, metrics, evaluation, run_info, read_serving(Path(output_dir))))
    return path


def refresh_page(output_dir: Path) -> Path:
    """Write index.html again from the report's metrics.json and serving.json.

    Raises:
        UserError: the run has no report yet.
    """
    directory = Path(output_dir) / "report"
    if not (directory / "metrics.json").exists():
        raise UserError("report", directory, "There is no report; run the recipe's report stage.")
    known = read_json(directory / "metrics.json")
    evaluation, run_info = known["evaluation"], known["run"]
    panels = build_panels(known["metrics"], evaluation, run_info["best_step"])
    path = directory / "index.html"
    serving = read_serving(Path(output_dir))
    write_text(path, _page(panels, known["metrics"], evaluation, run_info, serving))
    return path


def format_table(evaluation: dict[str, Any], run_info: dict[str, Any]) -> str:
    """Return the results as a table for the terminal, and the paths of export and report.

    Args:
        run_info: has the paths `export` and `report`.
    """
    lines: list[str] = []
    rows: list[tuple[str, str]] = []
    if evaluation.get("greedy"):
        lines += [line.replace("×", "x") for line in aligned(_decoding_rows(evaluation))] + [""]
        completions = identical_completions(evaluation["greedy"])
        rows = [("completions", completions), ("engine", evaluation["engine"])]
    rows += [(name, str(run_info[name])) for name in ("export", "report") if run_info.get(name)]
    if warning := untrained_warning(run_info):
        lines = [f"WARNING: {warning}", "", *lines]
    return "\n".join(lines + aligned(rows, text_columns=2))


def _decoding_rows(evaluation: dict[str, Any]) -> list[list[str]]:
    rows = [["drafter", "k", "temperature", "acceptance length", "tokens per target forward", "speed-up"]]
    for drafter, temperature, stats in decoding_runs(evaluation):
        length, tokens = f"{stats['acceptance_length']:.2f}", f"{stats['tokens_per_target_forward']:.2f}"
        rows.append(
            [drafter, str(stats["k"]), f"{temperature:g}", length, tokens, _times(stats.get("speedup"))]
        )
    replay = evaluation.get("replay")
    if replay:
        rows.append(
            ["trained, by replay", str(replay["k"]), "0", f"{replay['acceptance_length']:.2f}", "", ""]
        )
    untrained = _untrained_replay(evaluation)
    if untrained is not None:
        rows.append(["untrained, by replay", str(evaluation["k"]), "0", f"{untrained:.2f}", "", ""])
    return rows


def _untrained_replay(evaluation: dict[str, Any]) -> float | None:
    """Return the untrained drafter's acceptance length by replay if nothing was decoded with it."""
    if evaluation.get("untrained"):
        return None
    rows = evaluation.get("by_draft_length") or []
    return next((row["untrained"] for row in rows if row["k"] == evaluation["k"]), None)


def _save(path: Path, panels: Sequence[Panel], headline: str = "", panel_inches: float = 4.6) -> None:
    path.unlink(missing_ok=True)  # the picture of an earlier run would be misleading
    if panels:
        save_png(panels, path, headline, panel_inches)


def _headline(evaluation: dict[str, Any]) -> str:
    greedy = evaluation.get("greedy")
    if not greedy:
        return ""
    length = f"{greedy['acceptance_length']:.2f}"
    return f"Acceptance length {length} at k = {greedy['k']}, temperature 0, {evaluation['engine']}"


def _page(
    panels: dict[str, Panel],
    metrics: Sequence[dict[str, Any]],
    evaluation: dict[str, Any],
    run_info: dict[str, Any],
    serving: dict[str, Any] | None,
) -> str:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["duration"] = _duration
    return environment.get_template("report_template.html").render(
        colors=COLORS,
        figures={name: (panel, to_svg(panel)) for name, panel in panels.items()},
        evaluation=evaluation,
        headlines=_headlines(evaluation),
        warning=untrained_warning(run_info),
        decoding_rows=_decoding_rows(evaluation),
        runs=decoding_runs(evaluation),
        run_info=run_info,
        serving=serving,
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
    greedy = evaluation.get("greedy")
    if not greedy:
        return []
    scale = f"perfect {greedy['k'] + 1}"
    if evaluation.get("untrained"):
        scale = f"untrained {evaluation['untrained']['acceptance_length']:.2f}, " + scale
    elif (untrained := _untrained_replay(evaluation)) is not None:
        scale = f"untrained {untrained:.2f} by replay, " + scale
    counts = f"{greedy['num_tokens']:,} tokens, {greedy['num_target_forwards']:,} forwards"
    found = [
        (f"{greedy['acceptance_length']:.2f}", "acceptance length", scale),
        (f"{greedy['tokens_per_target_forward']:.2f}", "tokens per target forward", counts),
    ]
    if greedy.get("speedup") is not None:
        times = f"{_duration(greedy['seconds'])} instead of {_duration(greedy['plain_seconds'])}"
        found.append((_times(greedy["speedup"]), "measured speed-up", times))
    num_completions = greedy["num_identical"] + greedy["num_near_tie"] + greedy["num_different"]
    rest = f"{greedy['num_near_tie']} near-tie, {greedy['num_different']} different"
    found.append(
        (f"{greedy['num_identical']}/{num_completions}", "completions identical to the target's", rest)
    )
    return found


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


def _times(speedup: float | None) -> str:
    return "" if speedup is None else f"{speedup:.2f}×"


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"
