from pathlib import Path
from typing import Any

import pytest
from matplotlib.image import imread

from eagle31.errors import UserError
from eagle31.json_files import write_json
from tests.train.reporting.finished_run import drift_metrics, evaluation, finished_metrics, run_info
from tests.train.reporting.measured import acceptance
from train.reporting.comparison.differences import answers, places
from train.reporting.comparison.page import comparison_lines, write_comparison
from train.reporting.comparison.runs import comparable, read_runs


def cell(domain: str, rate: float, **known: Any) -> dict[str, Any]:
    return {"name": domain, "domain": domain, "condition": "", **acceptance(rate, seed=5), **known}


def finished(root: Path, name: str, rate: float, **changes: Any) -> Path:
    """Write the report and the configuration of a run whose drafts are accepted with a probability."""
    info = run_info() | {"target_fingerprint": "f00d"} | changes.pop("info", {})
    sampling = evaluation()["sampling"] | {"greedy_drafts": acceptance(rate - 0.2, seed=1)}
    measured = evaluation() | {"trained": acceptance(rate), "sampling": sampling, "matrix": None} | changes
    metrics = [*finished_metrics(), drift_metrics(400)]
    (root / name).mkdir(parents=True)
    (root / name / "config.yaml").write_text(
        f"drafter:\n  fc_norm: {rate > 0.6}\noutput_dir: {name}\nseed: 0\n"
    )
    known = {"evaluation": measured, "run": info, "metrics": metrics}
    write_json(root / name / "report" / "metrics.json", known)
    return root / name


def words(lines: list[str]) -> str:
    return " ".join(" ".join(lines).split())


def test_runs_are_compared_on_the_same_prompts(tmp_path: Path) -> None:
    runs = read_runs([finished(tmp_path, "short", 0.55), finished(tmp_path, "long", 0.7)])
    text = words(comparison_lines(runs))
    assert "drafter.fc_norm False True" in text
    assert "output_dir" not in text
    assert "long, compared with short: longer at temperature 0, k = 1 to 8; longer at temperature 1" in text
    assert "attention to own tokens, token 8" in text
    assert "best validation" in text
    found = places(runs)
    assert [place.k for place in found] == [*range(1, 9), *range(1, 9)]
    four = found[3]
    assert four.lengths[1].value / four.lengths[0].value == pytest.approx(four.ratios[1].value)
    # Prompts differ from each other more than the drafters do on the same one.
    widths = [(one.high - one.low) / one.value for one in (four.lengths[1], four.ratios[1])]
    assert widths[1] < widths[0]


def test_equal_drafters_are_not_told_apart(tmp_path: Path) -> None:
    rate = 0.66
    runs = read_runs([finished(tmp_path / part, "run", rate) for part in ("a", "b")])
    assert [run.name for run in runs] == ["a/run", "b/run"]
    assert {place.verdict(1) for place in places(runs)} == {"not told apart"}
    other = finished(tmp_path / "c", "run", rate, trained=acceptance(rate, seed=9))
    runs = read_runs([tmp_path / "a" / "run", other])
    assert "not told apart at temperature 0" in words(answers(runs, places(runs)))


def test_cells_are_compared_at_the_evaluations_draft_length(tmp_path: Path) -> None:
    matrices = [
        {"cells": [cell("gsm8k", rate), cell("code", rate, prompts_hash=name), cell("chat", 0.9 - rate)]}
        for rate, name in ((0.5, "one"), (0.6, "another"))
    ]
    paths = [
        finished(tmp_path, name, 0.6, matrix=matrix)
        for name, matrix in zip(("first", "second"), matrices, strict=True)
    ]
    runs = read_runs(paths)
    cells = [place for place in places(runs) if place.cell]
    assert [(place.group, place.k, place.verdict(1)) for place in cells] == [
        ("gsm8k", 4, "longer"),
        ("chat", 4, "shorter"),
    ]
    text = words(comparison_lines(runs))
    assert "longer in the cells gsm8k; shorter in the cells chat" in text
    assert "Not compared, because not every run has it with the same prompts: code" in text
    page, _ = write_comparison(runs, tmp_path / "out")
    assert "Acceptance length by cell of the matrix" in page.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"trained": acceptance(0.6, prompts="others")}, "32 other prompts"),
        ({"trained": acceptance(0.6, prompts="others"), "num_prompts": 8}, "other prompts: 8 instead of 32"),
        ({"max_new_tokens": 64}, "completions of up to 64 tokens instead of 128"),
        ({"info": {"target_fingerprint": "beef"}}, "another target"),
        ({"trained": acceptance(0.6) | {"prompts_hash": None}}, "does not say which prompts it has"),
    ],
)
def test_a_run_that_measured_something_else_is_named_and_left_out(
    tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    paths = [finished(tmp_path, "reference", 0.55), finished(tmp_path, "odd", 0.6, **changes)]
    runs = read_runs(paths)
    kept, refused = comparable(runs)
    assert [run.name for run in kept] == ["reference"]
    assert reason in refused["odd"]
    text = words(comparison_lines(runs))
    assert f"odd is not comparable with reference: {refused['odd']}" in text
    assert "Acceptance length with its" not in text
    [page] = write_comparison(runs, tmp_path / "out")
    assert "is not comparable with reference" in page.read_text(encoding="utf-8")

    third = finished(tmp_path, "third", 0.7)
    text = words(comparison_lines(read_runs([*paths, third])))
    assert "odd is not comparable" in text
    assert "third, compared with reference: longer at temperature 0, k = 1 to 8" in text


def test_another_temperature_is_not_compared(tmp_path: Path) -> None:
    colder = evaluation()["sampling"] | {"temperature": 0.6, "greedy_drafts": acceptance(0.5, seed=1)}
    runs = read_runs([finished(tmp_path, "a", 0.55), finished(tmp_path, "b", 0.6, sampling=colder)])
    assert {place.group for place in places(runs)} == {"temperature 0"}
    assert "with the same prompts: temperature 1" in words(comparison_lines(runs))


def test_the_page_is_one_file_and_the_picture_has_all_runs(tmp_path: Path) -> None:
    runs = read_runs(
        [finished(tmp_path, name, rate) for name, rate in (("a", 0.5), ("b", 0.6), ("<c>", 0.7))]
    )
    page, picture = write_comparison(runs, tmp_path / "out")
    html = page.read_text(encoding="utf-8")
    assert html.count("<svg") == 5
    assert "&lt;c&gt;" in html
    assert "<c>" not in html
    assert "<script" not in html
    assert " src=" not in html
    height, width, _ = imread(picture).shape
    assert height > 1000
    assert width > 1000


def test_what_cannot_be_read_is_refused_with_the_remedy(tmp_path: Path) -> None:
    good = finished(tmp_path, "good", 0.55)
    with pytest.raises(UserError, match="at least two"):
        read_runs([good])
    with pytest.raises(UserError, match="given twice"):
        read_runs([good, good])
    with pytest.raises(UserError, match="There is no report"):
        read_runs([good, tmp_path])
    with pytest.raises(UserError, match="at most 8"):
        read_runs([good] * 9)
    known = {"evaluation": {}, "run": run_info(), "metrics": []}
    write_json(tmp_path / "new" / "report" / "metrics.json", known)
    with pytest.raises(UserError, match=r"was not evaluated.*stages=\[evaluate,report\]"):
        read_runs([good, tmp_path / "new"])
