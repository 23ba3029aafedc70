import json
import re
from html.parser import HTMLParser
from itertools import combinations
from pathlib import Path
from typing import Any

import matplotlib
import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread

from eagle31.errors import UserError
from eagle31.json_files import read_json, write_json, write_jsonl
from tests.train.report.finished_run import (
    acceptance,
    by_draft_length,
    drift_metrics,
    evaluation,
    finished_metrics,
    run_info,
    serving,
    statistics,
)
from train.artifact import link_result
from train.report.card import model_card
from train.report.plots import run_panels
from train.report.report import write_page, write_report
from train.report.results import Report, format_results, read_report


class Page(HTMLParser):
    """The visible text of a page, its tags, and the URLs that it would load."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.text = ""
        self.links: list[str] = []
        self.tags: list[str] = []
        self.feed(html)
        self.text = " ".join(self.text.replace("\xa0", " ").split())

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attributes if name in ("src", "href")]

    def handle_data(self, data: str) -> None:
        self.text += f"{data} "


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the plots, which take most of a report's time."""
    monkeypatch.setattr("train.report.report.svg_uri", lambda panel: "data:image/svg+xml;base64,")
    monkeypatch.setattr("train.report.report.save_png", lambda *_, **__: None)


def report(directory: Path, metrics: list[dict[str, Any]], measured: dict[str, Any], **known: Any) -> Page:
    write_jsonl(directory / "metrics.jsonl", metrics)
    path = write_report(directory, directory / "metrics.jsonl", measured, run_info() | known)
    assert path == directory / "report" / "index.html"
    return Page(path.read_text(encoding="utf-8"))


def test_full_report(tmp_path: Path) -> None:
    style = dict(matplotlib.rcParams)
    page = report(tmp_path, finished_metrics(), evaluation())
    saved = read_json(tmp_path / "report" / "metrics.json")
    assert saved == {"evaluation": evaluation(), "run": run_info(), "metrics": finished_metrics()}
    for shown in (
        "2.53",
        "2.42 to 2.65",
        "2.80",
        "7/8",
        "trained greedy 4 1 1.85",
        "eagle31 (transformers, float32, cpu)",
        "vllm serve /home/someone/.cache/eagle31/embedded-3f2a91",
    ):
        assert shown in page.text
    assert page.tags.count("figure") == 4
    assert "Drift" not in page.text
    assert dict(matplotlib.rcParams) == style
    assert all(link.startswith("data:image/svg+xml") for link in page.links)  # a single file
    assert not {"script", "link", "iframe", "base", "object"} & set(page.tags)
    html = (tmp_path / "report" / "index.html").read_text(encoding="utf-8")
    assert not re.findall(r"@import|url\(|https?://", html)
    measured = evaluation() | {"trained": acceptance(0.6, num_prompts=1)}
    json.dumps(measured, allow_nan=False)
    assert "95 % interval unknown" in report(tmp_path, finished_metrics(), measured).text
    height, width, _ = imread(tmp_path / "report" / "summary.png").shape
    assert 2 < width / height < 4


@pytest.mark.parametrize("rate", [0.1, 0.6, 0.99])
def test_no_legend_covers_a_curve(rate: float) -> None:
    panels = run_panels(finished_metrics(), evaluation() | {"trained": acceptance(rate)}, 360)
    figure = Figure((4.9, 3.1), layout="constrained")
    for panel in panels.values():
        axes = figure.subplots()
        panel.draw(axes)
        figure.draw_without_rendering()
        covered = axes.get_legend().get_window_extent()
        paths = [axes.transData.transform_path(line.get_path()) for line in axes.get_lines()]
        boxes = [bar.get_window_extent() for bar in axes.patches]
        assert not any(path.intersects_bbox(covered, filled=False) for path in paths)
        assert not any(covered.overlaps(box) for box in boxes)
        figure.clear()


@pytest.mark.parametrize("k", [4, 8, 16, 64])
def test_no_label_covers_another(k: int) -> None:
    accepted = [int(800 * 0.8**position) for position in range(k)]
    measured = (
        evaluation() | {"k": k} | dict.fromkeys(("trained", "untrained"), by_draft_length(accepted, 1000))
    )
    panels = run_panels(finished_metrics(), measured, 360)
    figure = Figure((4.9, 3.1), layout="constrained")
    for name in ("draft_length", "positions"):
        with matplotlib.rc_context({"font.size": 9.5}):  # that of the page
            axes = figure.subplots()
            panels[name].draw(axes)
        figure.draw_without_rendering()
        texts = [one for one in (*axes.texts, *axes.get_xticklabels()) if one.get_text()]
        boxes = [one.get_window_extent() for one in texts]
        assert not any(one.overlaps(other) for one, other in combinations(boxes, 2))
        figure.clear()


def test_drift_is_shown_where_it_was_measured(tmp_path: Path) -> None:
    records = finished_metrics() + [drift_metrics(step) for step in range(0, 401, 40)]
    page = report(tmp_path, records, evaluation())
    assert page.tags.count("figure") == 6
    assert "Measured at step 360" in page.text  # the exported one


@pytest.mark.usefixtures("undrawn")
def test_the_serve_command_of_a_run_without_a_gpu(tmp_path: Path) -> None:
    page = report(tmp_path, [], evaluation(), device="cpu")
    assert "--gpu-memory-utilization 0.4 --enforce-eager --model /home/someone/" in page.text
    assert "vllm serve" not in page.text


def test_page_shows_names_as_text(tmp_path: Path) -> None:
    assert "script" not in report(tmp_path, [], evaluation(), target="<script>alert(1)</script>").tags


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("part", ["completions", "replay"])
def test_what_decoding_contradicts_is_a_warning(tmp_path: Path, part: str) -> None:
    measured = evaluation()
    measured["decoding"][part] = {"num_identical": 5, "num_near_tie": 1, "num_different": 2}
    assert "cannot be trusted" in report(tmp_path, [], measured).text
    table = format_results(measured, run_info() | {"report": "page"})
    assert table.startswith("WARNING: ")
    assert "5 of 8 identical, 1 near-tie, 2 different" in table
    assert f"Decoded by {measured['engine']}; replayed from {measured['states']}." in table
    assert "drafter is untrained" in format_results(measured, run_info() | {"best_step": 0, "report": "page"})


@pytest.mark.usefixtures("undrawn")
def test_a_report_of_another_export_is_not_that_of_the_run(tmp_path: Path) -> None:
    results = [tmp_path / "artifacts" / f"export-{number}" / "checkpoint" for number in (1, 2)]
    for result in results:
        result.mkdir(parents=True)
        link_result(tmp_path, "export", result)
        report(tmp_path, [], evaluation(), export_key=result.parent.name)
    assert read_report(tmp_path).run["export_key"] == "export-2"
    link_result(tmp_path, "export", results[0])
    with pytest.raises(UserError, match=r"another export; .*stages=.report"):
        read_report(tmp_path)


def test_decoding_that_was_compared_with_nothing_is_a_warning() -> None:
    measured = evaluation()
    measured["decoding"]["completions"] = dict.fromkeys(("num_identical", "num_near_tie", "num_different"), 0)
    measured["decoding"]["completions"]["num_not_compared"] = 8
    assert "Decoding was not checked" in format_results(measured)
    measured["decoding"]["completions"] |= {"num_identical": 1, "num_not_compared": 7}
    assert "WARNING" not in format_results(measured)


@pytest.mark.usefixtures("undrawn")
def test_speed_in_vllm_is_shown_only_for_its_export(tmp_path: Path) -> None:
    report(tmp_path, finished_metrics(), evaluation())
    for export in ("export", "another"):
        write_json(tmp_path / "report" / "serving.json", serving(str((tmp_path / export).resolve())))
        page = Page(write_page(tmp_path).read_text(encoding="utf-8"))
        for shown in ("1.80×", "speed-up in vLLM for 1 user, k = 4", "8 4 41.5 74.7 0.90x (0.81 to 0.98)"):
            assert (shown in page.text) == (export == "export")


def test_the_targets_own_mtp_head_is_next_to_the_drafter(undrawn: None, tmp_path: Path) -> None:
    measured = evaluation()
    trained = {"drafts": [[9] * 8] * 3 + [[2] * 8], "accepted": [[9] * 8] * 3 + [[1, 2, 3, 4] * 2]}
    measured["trained"]["by_prompt"] = trained
    head = {"by_draft_length": [statistics([300, 200, 100, 50], 500, low=2.2, high=2.4)]}
    measured["mtp"] = head | {"by_prompt": {"drafts": [[2] * 8], "accepted": [[1] * 8]}}
    page = report(tmp_path, finished_metrics(), measured)
    card = model_card(
        Report(measured, run_info()), {"model_type": "llama", "fc_norm": True, "norm_output": True}
    )
    assert "a multi-token prediction head, drafted in vLLM for 8 of the held-out prompts" in card
    assert "the target's own MTP head greedy 4 0 2.30 2.20 to 2.40" in page.text
    assert "for 8 of the held-out prompts; the trained drafter has 1.50 (" in page.text  # 2.25 / 1.5
    assert "the target's own MTP head, greedy, temperature 0  60 %" in format_results(measured)
    measured["mtp"]["by_prompt"] = {"drafts": [[2] * 7], "accepted": [[1] * 7]}  # one did not fit
    assert "for 7 of the held-out prompts" in format_results(measured)
    assert "times its acceptance length" not in format_results(measured)
    measured["mtp"] = {"missing": "not measured: vLLM failed"}
    assert re.search("the target's own MTP head +not measured: vLLM failed", format_results(measured))
    assert "MTP head, greedy" not in format_results(measured)
