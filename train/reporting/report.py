"""What a person looks at when a run has ended: a page, pictures, and a small table."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from eagle31.errors import UserError
from eagle31.export.layouts import Layout
from eagle31.json_files import read_json, read_jsonl, write_json, write_text
from train.reporting.model_card import (
    DRAFT_TOKENS,
    samples_text,
    serve_command,
    steps_text,
    target_name,
    vocabulary_text,
)
from train.reporting.plots import COLOURS, Panel, build_panels, save_png, to_svg
from train.reporting.results import decoding_runs, identical_completions
from train.tables import aligned

# The PNG files: each shows those of its panels that there are numbers for.
PICTURES = {
    "loss.png": ("loss",),
    "acceptance_over_training.png": ("agreement", "expected_acceptance", "replay"),
    "draft_length.png": ("draft_length",),
    "acceptance_by_position.png": ("positions",),
}
SUMMARY = ("loss", "replay", "draft_length")


def write_report(
    output_dir: Path, metrics_path: Path, evaluation: dict[str, Any], facts: dict[str, Any]
) -> Path:
    """Writes `output_dir/report`: index.html, PNG pictures and metrics.json with every number in them.

    Args:
        metrics_path: the run's metrics.jsonl.
        evaluation: what the evaluation measured; parts of it may be missing.
        facts: what the run knows of itself.

    Returns: the path of index.html.
    """
    directory = Path(output_dir) / "report"
    directory.mkdir(parents=True, exist_ok=True)
    metrics = read_jsonl(metrics_path)
    write_json(directory / "metrics.json", {"evaluation": evaluation, "facts": facts, "metrics": metrics})

    panels = build_panels(metrics, evaluation, facts["best_step"])
    for name, chosen in PICTURES.items():
        _save(directory / name, [panels[p] for p in chosen if p in panels])
    summary = [panels[p] for p in SUMMARY if p in panels]
    _save(directory / "summary.png", summary, _headline(evaluation), panel_inches=3.5)

    path = directory / "index.html"
    write_text(path, _page(panels, evaluation, facts, read_serving(Path(output_dir))))
    return path


def refresh_page(output_dir: Path) -> Path:
    """Writes index.html anew from metrics.json and serving.json beside it.

    Raises:
        UserError: the run has no report yet.
    """
    directory = Path(output_dir) / "report"
    if not (directory / "metrics.json").exists():
        raise UserError("report", directory, "There is no report here; run the recipe's report stage.")
    known = read_json(directory / "metrics.json")
    evaluation, facts = known["evaluation"], known["facts"]
    panels = build_panels(known["metrics"], evaluation, facts["best_step"])
    path = directory / "index.html"
    write_text(path, _page(panels, evaluation, facts, read_serving(Path(output_dir))))
    return path


def read_serving(output_dir: Path) -> dict[str, Any] | None:
    """What was measured in vLLM, unless it was another export than the run's present one."""
    path = output_dir / "report" / "serving.json"
    if not path.exists():
        return None
    numbers = read_json(path)
    return numbers if Path(numbers["export"]) == (output_dir / "export").resolve() else None


def format_table(evaluation: dict[str, Any], facts: dict[str, Any]) -> str:
    """The measured numbers as aligned text, and where everything lies.

    Args:
        facts: `export` and `report` are the paths shown.
    """
    lines = []
    if evaluation.get("greedy"):
        lines += [line.replace("×", "x") for line in aligned(_decoding_rows(evaluation))] + [""]
        lines += [
            f"text     {identical_completions(evaluation['greedy'])}",
            f"engine   {evaluation['engine']}",
        ]
    lines += [f"{name:<8} {facts[name]}" for name in ("export", "report") if facts.get(name)]
    return "\n".join(lines)


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
    """Acceptance length where an untrained drafter was not decoded with, but replayed."""
    if evaluation.get("untrained"):
        return None
    rows = evaluation.get("by_draft_length") or []
    return next((row["untrained"] for row in rows if row["k"] == evaluation["k"]), None)


def _save(path: Path, panels: Sequence[Panel], headline: str = "", panel_inches: float = 4.6) -> None:
    path.unlink(missing_ok=True)  # no picture is better than the one of an earlier run
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
    evaluation: dict[str, Any],
    facts: dict[str, Any],
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
        colours=COLOURS,
        figures={name: (panel, to_svg(panel)) for name, panel in panels.items()},
        evaluation=evaluation,
        headlines=_headlines(evaluation),
        decoding_rows=_decoding_rows(evaluation),
        runs=decoding_runs(evaluation),
        facts=facts,
        serving=serving,
        title=target_name(facts),
        configuration=_configuration(facts),
        total_seconds=sum(stage["seconds"] for stage in facts["stages"] if not stage["reused"]),
        serve=serve_command(
            str(facts["target"]),
            str(facts["export"]),
            evaluation.get("k", DRAFT_TOKENS),
            facts.get("layout", Layout.vllm.value),
        ),
    )


def _headlines(evaluation: dict[str, Any]) -> list[tuple[str, str, str]]:
    """(number, what it counts, what to hold it against) of the figures at the top."""
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
    rest = f"{greedy['num_near_tie']} part at a near-tie, {greedy['num_different']} differ"
    found.append((f"{greedy['num_identical']}/{num_completions}", "texts identical to the target's", rest))
    return found


def _configuration(facts: dict[str, Any]) -> list[tuple[str, str]]:
    rows = [
        ("recipe", facts["recipe"]),
        ("target", facts["target"]),
        ("training data", facts["train_data"]),
        ("trained on", samples_text(facts)),
        ("optimizer steps", steps_text(facts)),
        ("drafter", f"{facts['drafter_parameters']:,} parameters"),
        ("aux layer ids", ", ".join(map(str, facts["aux_layer_ids"])) + " (decoder layers applied)"),
        ("draft vocabulary", vocabulary_text(facts)),
        ("export", facts["export"]),
        ("git revision", facts["git_revision"]),
        ("versions", ", ".join(f"{name} {version}" for name, version in sorted(facts["versions"].items()))),
    ]
    return [(name, str(value)) for name, value in rows if value is not None]


def _times(speedup: float | None) -> str:
    return "" if speedup is None else f"{speedup:.2f}×"


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"
