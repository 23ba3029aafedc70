import re
from pathlib import Path

import pytest

from eagle31.json_files import write_json
from tests.runs.here import run_command
from tests.train.report.finished_run import acceptance, evaluation, finished_metrics, run_info, serving
from train.report.comparison import comparison_lines, read_runs


def finished(
    directory: Path, rate: float, *, texts: str = "same", target: str = "files:f00d", sampled: str = "same"
) -> Path:
    """Write the report of a run whose drafts are accepted with a probability."""
    drafts = acceptance(rate, texts=f"sampled, {sampled}", num_prompts=24 if sampled == "same" else 23)
    sampling = {"temperature": 1.0, "settings": "temperature=1"}
    sampling |= {"greedy_drafts": drafts, "sampled_drafts": drafts}
    measured = evaluation() | {"trained": acceptance(rate, texts=texts), "sampling": sampling}
    settings = {"drafter": {"fc_norm": rate > 0.6}, "output_dir": str(directory), "seed": 0}
    info = run_info() | {"target_fingerprint": target, "settings": settings}
    known = {"evaluation": measured, "run": info, "metrics": finished_metrics()}
    write_json(directory / "report" / "metrics.json", known)
    write_json(directory / "report" / "serving.json", serving(str((directory / "export").resolve())))
    return directory


def rows(lines: list[str]) -> dict[str, list[str]]:
    """Return the cells of the table by the name of their row."""
    split = (re.split(r"\s{2,}", line) for line in lines)
    return {name: cells for name, *cells in split}


def test_runs_are_compared_on_the_same_prompts(tmp_path: Path) -> None:
    runs = read_runs([finished(tmp_path / "short", 0.55), finished(tmp_path / "long", 0.7)])
    table = rows(comparison_lines(runs))
    assert table["drafter.fc_norm"] == ["False", "True"]
    assert not {"output_dir", "seed"} & table.keys()
    assert table["speed-up, users = 8, k = 4"] == ["0.90x (0.81 to 0.98)"] * 2
    short, long = table["temperature 0, k = 4"]
    numbers = [float(one) for one in re.findall(r"\d+\.\d+", f"{short} {long}")]
    length, _, _, longer, low, high, ratio, ratio_low, ratio_high = numbers
    assert longer / length == pytest.approx(ratio, abs=0.01)
    # Prompts differ from each other more than the drafters do on the same one.
    assert 1 < ratio_low < ratio < ratio_high
    assert (ratio_high - ratio_low) / ratio < (high - low) / longer


@pytest.mark.parametrize("other", [{"texts": "others"}, {"target": "files:beef"}])
def test_what_cannot_be_compared_has_no_ratio(tmp_path: Path, other: dict[str, str]) -> None:
    lines = comparison_lines(
        read_runs([finished(tmp_path / "a", 0.5), finished(tmp_path / "b", 0.6, **other)])
    )
    assert any(line.startswith("WARNING: run 2 is not compared") for line in lines)
    assert "[" not in "".join(rows(lines)["temperature 0, k = 4"])


def test_sampled_completions_are_compared_only_where_they_are_the_same(tmp_path: Path) -> None:
    runs = [("a", "same"), ("b", "same"), ("c", "another seed")]
    lines = comparison_lines(read_runs([finished(tmp_path / name, 0.5, sampled=text) for name, text in runs]))
    assert ["[" in cell for cell in rows(lines)["temperature 0, k = 4"]] == [False, True, True]
    assert ["[" in cell for cell in rows(lines)["temperature 1, k = 4"]] == [False, True, False]


def test_a_directory_without_a_run_is_refused(tmp_path: Path) -> None:
    done = run_command("scripts/report", finished(tmp_path / "a", 0.5), tmp_path)
    assert done.status == 2
    assert f"RUN={tmp_path}: It has no report" in done.err


def test_the_command_compares_several_runs_and_writes_the_page_of_one(tmp_path: Path) -> None:
    runs = [finished(tmp_path / name, rate) for name, rate in (("a", 0.5), ("b", 0.6), ("c", 0.7))]
    assert "run 3" in run_command("scripts/report", *runs).out
    done = run_command("scripts/report", runs[0])
    assert done.status == 0
    assert str(tmp_path / "a" / "report" / "index.html") in done.out
