"""The comparison for a terminal, as a page, and as a picture."""

from collections.abc import Sequence
from pathlib import Path

from eagle31.json_files import write_text
from train.reporting.comparison.differences import Place, answers, left_out, places
from train.reporting.comparison.figures import comparison_panels
from train.reporting.comparison.history import training_rows
from train.reporting.comparison.runs import Run, comparable, different_settings
from train.reporting.page import render_page
from train.reporting.plots import save_columns
from train.tables import aligned

# The columns of the picture.
PICTURE = (("difference",), ("lengths", "positions", "minutes"))


def comparison_lines(runs: Sequence[Run]) -> list[str]:
    """Return the comparison's tables for a terminal."""
    kept, refused = comparable(runs)
    lines = [
        *_refusals(runs, refused),
        "Settings that differ",
        "",
        *aligned(different_settings(runs), 1 + len(runs)),
    ]
    if len(kept) < 2:
        return lines
    found = places(kept)
    lines += ["", "Acceptance length with its 95 % interval, and the difference on the same prompts", ""]
    lines += aligned(length_table(kept, found), text_columns=1)
    lines += ["", *answers(kept, found), *_not_shown(kept)]
    return [*lines, "", *aligned(training_rows(kept), 1 + len(kept))]


def write_comparison(runs: Sequence[Run], directory: Path) -> list[Path]:
    """Write index.html and, where runs can be compared, comparison.png; return their paths."""
    kept, refused = comparable(runs)
    found = places(kept) if len(kept) > 1 else []
    panels = comparison_panels(kept, found) if found else {}
    directory.mkdir(parents=True, exist_ok=True)
    page, picture = directory / "index.html", directory / "comparison.png"
    text = render_page(
        "comparison.html",
        panels,
        names=[run.name for run in runs],
        refusals=_refusals(runs, refused),
        answers=answers(kept, found),
        not_shown=_not_shown(kept) if found else [],
        lengths=length_table(kept, found) if found else [],
        training=training_rows(kept) if found else [],
        settings=different_settings(runs),
        panels=list(panels),
    )
    write_text(page, text)
    picture.unlink(missing_ok=True)
    if not panels:
        return [page]
    columns = [[panels[name] for name in names if name in panels] for names in PICTURE]
    save_columns([one for one in columns if one], picture, " · ".join(run.name for run in kept))
    return [page, picture]


def length_table(runs: Sequence[Run], found: Sequence[Place]) -> list[list[str]]:
    """Return a header, and a row for each place: lengths, and the differences from the first run."""
    head = ["", "k", *(run.name for run in runs), *(f"{run.name} - {runs[0].name}" for run in runs[1:])]
    rows = [head]
    for place in found:
        lengths = [f"{one.value:.2f} ({one.low:.2f} to {one.high:.2f})" for one in place.lengths]
        differences = [
            f"{100 * one.value - 100:+.1f} % ({100 * one.low - 100:+.1f} to {100 * one.high - 100:+.1f})"
            for one in place.ratios[1:]
        ]
        rows.append([place.group, str(place.k), *lengths, *differences])
    return rows


def _refusals(runs: Sequence[Run], refused: dict[str, str]) -> list[str]:
    return [f"{name} is not comparable with {runs[0].name}: {reason}" for name, reason in refused.items()]


def _not_shown(runs: Sequence[Run]) -> list[str]:
    missing = left_out(runs)
    if not missing:
        return []
    return [f"Not compared, because not every run has it with the same prompts: {', '.join(missing)}"]
