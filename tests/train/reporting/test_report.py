import itertools
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread

from eagle31.errors import UserError
from eagle31.json_files import read_sealed_json, write_json, write_jsonl
from tests.train.reporting.finished_run import (
    drift_metrics,
    evaluation,
    finished_metrics,
    run_info,
    timing,
    train_metrics,
    validation_metrics,
)
from train.reporting import report as report_module
from train.reporting.plots import COLORS, build_panels, to_svg
from train.reporting.report import format_table, refresh_page, write_report
from train.reporting.results import SERVING_FORMAT

PICTURES = {
    "loss.png",
    "acceptance_over_training.png",
    "draft_length.png",
    "acceptance_by_position.png",
    "summary.png",
}


XML_NAMES = {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}


class Page(HTMLParser):
    """The visible text of a page, its ids, and the URLs that it would load."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.text = ""
        self.ids: list[str] = []
        self.links: list[str] = []
        self.tags: list[str] = []
        self.classes: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attributes:
            if name == "class":
                self.classes.append(value or "")
            if name == "id":
                self.ids.append(value or "")
            if name in ("src", "href", "xlink:href") and not (value or "").startswith("#"):
                self.links.append(value or "")

    def handle_data(self, data: str) -> None:
        self.text += data


def report(
    directory: Path,
    metrics: list[dict[str, Any]],
    measured: dict[str, Any],
    *,
    drawn: bool = False,
    **known: Any,
) -> Page:
    """Write a report and return its page, whose pictures are drawn; the PNG files only if `drawn`."""
    metrics_path = directory / "metrics.jsonl"
    write_jsonl(metrics_path, metrics)
    with pytest.MonkeyPatch.context() as patch:
        if not drawn:  # which takes most of the time
            patch.setattr(report_module, "save_png", lambda _, path, *settings: path.touch())
        path = write_report(directory, metrics_path, measured, run_info() | known)
    assert path == directory / "report" / "index.html"
    return Page(path.read_text(encoding="utf-8"))


def pictures(directory: Path) -> set[str]:
    return {path.name for path in (directory / "report").glob("*.png")}


def test_full_report(tmp_path: Path) -> None:
    style = dict(matplotlib.rcParams)
    page = report(tmp_path, finished_metrics(), evaluation(), drawn=True)
    assert pictures(tmp_path) == PICTURES
    saved = read_sealed_json(tmp_path / "report" / "metrics.json")
    assert saved == {"evaluation": evaluation(), "run": run_info(), "metrics": finished_metrics()}
    for shown in (
        "2.53",
        "2.42 to 2.65",
        "2.80",
        "1.80×",
        "7/8",
        "temperature 0",
        "temperature 1",
        "eagle31 (transformers, float32, cpu)",
    ):
        assert shown in page.text.replace("\xa0", " ")
    assert "vllm serve /home/someone/.cache/eagle31/embedded-3f2a91" in page.text
    assert page.tags.count("svg") == 6
    assert dict(matplotlib.rcParams) == style

    assert page.links == []  # a single file
    assert "script" not in page.tags
    html = (tmp_path / "report" / "index.html").read_text(encoding="utf-8")
    # What else a browser would load: @import, and url() of anything that is not on the page.
    assert not re.findall(r"@import|url\((?!['\"]?#)|<(?:link|iframe|img|base|object)\b", html)
    assert set(re.findall(r"https?://[^\s\"'<>]+", html)) <= XML_NAMES
    assert len(page.ids) == len(set(page.ids))

    height, width, _ = imread(tmp_path / "report" / "summary.png").shape
    assert width >= 1800
    assert 2 < width / height < 4


def test_drift_is_shown_where_it_was_measured(tmp_path: Path) -> None:
    before = report(tmp_path, finished_metrics(), evaluation())
    assert "Drift" not in before.text
    records = finished_metrics() + [drift_metrics(step) for step in range(0, 401, 40)]
    page = report(tmp_path, records, evaluation(), drawn=True)
    assert page.tags.count("svg") == before.tags.count("svg") + 4
    assert pictures(tmp_path) == PICTURES | {"drift.png"}
    text = " ".join(page.text.replace("\xa0", " ").split())
    assert "Measured at step 360" in text  # the exported one
    assert "8 34.0 % 22.7 % 43.3 % 32.46" in text  # the eighth token, which no draft reached
    assert "1 60.0 % 40.0 % 0.0 % 1.90 50 % of 40" in text
    assert "5 6.25 50.0 %" in text
    assert "RMS after fc_norm" not in text
    for layer in records[-2]["captured"]:
        layer["normed_rms"] = 1.25
    text = " ".join(report(tmp_path, records, evaluation()).text.replace("\xa0", " ").split())
    assert "RMS after fc_norm" in text
    assert "5 6.25 1.25 50.0 %" in text


def test_report_without_the_optional_parts(tmp_path: Path) -> None:
    measured = evaluation() | {"sampling": None, "untrained": None}
    page = report(tmp_path, [], measured, drawn=True)
    assert "2.53" in page.text
    assert "temperature 1" not in page.text.replace("\xa0", " ")
    assert "untrained" not in page.text
    assert pictures(tmp_path) == {"draft_length.png", "acceptance_by_position.png", "summary.png"}
    assert "2.53" in format_table(measured, run_info())


def test_positions_and_draft_lengths_go_to_the_longest_draft(tmp_path: Path) -> None:
    measured = evaluation()
    # vLLM samples with drafts of k tokens alone, and never draws them from the drafter's distribution.
    rows = measured["sampling"]["greedy_drafts"]["by_draft_length"]
    measured["sampling"] |= {"greedy_drafts": {"by_draft_length": rows[3:4]}, "sampled_drafts": None}
    text = report(tmp_path, [], measured).text.replace("\xa0", " ")
    assert "3.2 %" in text  # of all drafts, at position 8
    assert f"{rows[3]['acceptance_length']:.2f}" in text
    assert f"{rows[7]['acceptance_length']:.2f}" not in text


def test_a_speed_that_is_not_known_is_not_shown(tmp_path: Path) -> None:
    measured = evaluation()
    unknown = "3 prompts were timed, and at least 5 are needed"
    measured["decoding"]["timing"] = timing(speedup=None, unknown=unknown)
    page = report(tmp_path, [], measured)
    assert unknown in page.text
    assert "1.62" not in page.text
    assert "90.5" not in page.text
    assert f"not known: {unknown}" in format_table(measured, run_info())


def test_an_evaluation_of_another_version_is_refused(tmp_path: Path) -> None:
    (tmp_path / "report").mkdir()
    known = {"evaluation": evaluation() | {"format": 1}, "run": run_info(), "metrics": []}
    write_json(tmp_path / "report" / "metrics.json", known)
    with pytest.raises(UserError, match=r"earlier version.*stages=\[evaluate,report\]"):
        refresh_page(tmp_path)


def test_early_report_removes_the_pictures_of_an_earlier_report(tmp_path: Path) -> None:
    (tmp_path / "report").mkdir()
    for name in PICTURES:
        (tmp_path / "report" / name).touch()
    records = train_metrics(num_steps=2, num_depths=1)
    unknown = {"best_step": None, "draft_vocab_size": None, "git_revision": None}
    page = report(tmp_path, records, {}, drawn=True, **unknown)
    assert "Not evaluated yet" in page.text
    assert pictures(tmp_path) == {"loss.png", "acceptance_over_training.png", "summary.png"}
    assert "export" in format_table({}, run_info())


def test_page_shows_names_as_text(tmp_path: Path) -> None:
    page = report(tmp_path, [], {}, target="<script>alert(1)</script>")
    assert "script" not in page.tags


def test_embedded_target_has_a_name_and_is_served_from_its_directory(tmp_path: Path) -> None:
    page = report(tmp_path, [], evaluation(), target="/cache/embedded-3f2a91/model", target_embedded=True)
    assert "Drafter for eagle31's embedded target" in page.text
    assert "vllm serve /cache/embedded-3f2a91/model " in page.text


@pytest.mark.parametrize(("part", "warning"), [("completions", "another text"), ("replay", "other drafts")])
def test_what_decoding_contradicts_is_a_warning(tmp_path: Path, part: str, warning: str) -> None:
    measured = evaluation()
    measured["decoding"][part] = {"num_identical": 5, "num_near_tie": 1, "num_different": 2}
    page = report(tmp_path, [], measured)
    assert "conditions warning" in page.classes
    assert warning in page.text
    table = format_table(measured, run_info())
    assert table.startswith("WARNING: ")
    assert "5 of 8 identical, 1 near-tie, 2 different" in table


def test_depth_curves_show_what_was_logged() -> None:
    records = train_metrics(num_steps=6, every=1, num_depths=3)
    axes = Figure().subplots()
    build_panels(records, {})["loss"].draw(axes)
    assert len(axes.lines) == 3
    np.testing.assert_array_equal(np.asarray(axes.lines[2].get_xdata()), [1, 2, 3, 4, 5, 6])
    np.testing.assert_allclose(
        np.asarray(axes.lines[2].get_ydata(), float), [r["depth"][2]["loss"] for r in records]
    )


@pytest.mark.parametrize("key", ["loss", "agreement"])
def test_diverged_run_is_drawn(key: str) -> None:
    records = train_metrics(num_steps=6, every=1, num_depths=2)
    for depth in records[-1]["depth"]:
        depth[key] = float("nan")
    assert to_svg(build_panels(records, {})[key]).startswith("<svg")


def test_long_runs_are_drawn_as_means() -> None:
    records = train_metrics(num_steps=1001, every=1, num_depths=1)
    axes = Figure().subplots()
    build_panels(records, {})["loss"].draw(axes)
    y = np.asarray(axes.lines[0].get_ydata())
    assert len(y) <= 80
    assert y[0] == pytest.approx(np.mean([r["depth"][0]["loss"] for r in records[:13]]))
    assert y[-1] == pytest.approx(np.mean([r["depth"][0]["loss"] for r in records[13 * (len(y) - 1) :]]))


def test_names_of_close_curves_do_not_overlap() -> None:
    record = validation_metrics(400)
    record["acceptance_length"] = {str(k): 1.5 + 0.001 * k for k in range(1, 6)}
    figure = Figure(layout="constrained")
    axes = figure.subplots()
    build_panels([record], {})["replay"].draw(axes)
    figure.draw_without_rendering()
    boxes = [text.get_window_extent() for text in axes.texts if text.get_text().startswith("k = ")]
    boxes.sort(key=lambda box: box.y0)
    assert len(boxes) == 5
    assert all(low.y1 <= high.y0 + 1 for low, high in itertools.pairwise(boxes))


def test_svg_follows_the_page(tmp_path: Path) -> None:
    for panel in build_panels(finished_metrics(), evaluation(), best_step=360).values():
        svg = to_svg(panel)
        ET.fromstring(svg)
        assert "font-family" not in svg
        outside = re.sub(r"light-dark\(#[0-9a-f]{6}, #[0-9a-f]{6}\)", "", svg)
        fixed = set(re.findall(r"(?:fill|stroke): (#[0-9a-f]{6})", outside))
        assert fixed <= {"#ffffff"}, panel.name  # no color that one of the schemes would hide


def test_text_is_legible_in_both_schemes() -> None:
    for scheme in (0, 1):
        surface = luminance(COLORS["surface"][scheme])
        for name in ("ink", "muted", "accent", "warning"):
            pair = sorted((luminance(COLORS[name][scheme]), surface))
            assert (pair[1] + 0.05) / (pair[0] + 0.05) >= 4.5, name  # WCAG 2.2, 1.4.3


def luminance(color: str) -> float:
    channels = np.array([int(color[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    linear = np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)
    return float(linear @ [0.2126, 0.7152, 0.0722])


def test_table_columns_are_aligned() -> None:
    text = format_table(evaluation(), run_info() | {"report": Path("/runs/report/index.html")})
    rows = text.split("\n\n")[0].splitlines()
    assert rows[0].split("  ")[0] == "drafter"
    assert [row.split()[1] for row in rows[1:]] == ["greedy", "greedy", "sampled", "greedy"]
    ends = {
        row.index(value) + len(value)
        for row, value in zip(rows[1:], ("2.53", "1.85", "2.15", "1.00"), strict=True)
    }
    assert ends == {rows[0].index("acceptance length") + len("acceptance length")}
    assert "8 of them by eagle31 (transformers, float32, cpu)" in text
    assert text.endswith("/runs/report/index.html")


def test_speed_in_vllm_is_shown_only_for_its_export(tmp_path: Path) -> None:
    export = tmp_path / "export"
    report(tmp_path, finished_metrics(), evaluation())
    spread = {"median": 41.5, "lowest": 40.0, "highest": 43.0}
    numbers = {
        "engine": "vLLM 0.32.0",
        "device": "a CPU",
        "dtype": "float32",
        "format": SERVING_FORMAT,
        "temperature": 0,
        "max_new_tokens": 64,
        "ignore_eos": False,
        "rounds": 3,
        "rows": [
            {
                "concurrency": 16,
                "k": 4,
                "acceptance_length": 2.5,
                "plain": spread,
                "drafter": spread,
                "speedup": spread,
            }
        ],
    }
    another, earlier = {"export": str(tmp_path / "another")}, {"format": SERVING_FORMAT - 1}
    for changed, shown in (({}, True), (another, False), (earlier, False)):
        measured = numbers | {"export": str(export.resolve())} | changed
        write_json(tmp_path / "report" / "serving.json", measured)
        page = Page(refresh_page(tmp_path).read_text(encoding="utf-8"))
        assert ("per second per user" in page.text) == shown
        assert ("41.5" in page.text) == shown


def test_speed_and_memory_of_a_gpu_are_on_the_page(tmp_path: Path) -> None:
    known = {
        "supervised_positions_per_second": 1020.0,
        "step_seconds_p50": 1.25,
        "step_seconds_p95": 2.5,
        "model_flops_utilization": 0.41,
        "peak_memory_gb": 61.2,
        "planned_memory_gb": 64.0,
        "checkpoint_seconds": 2.0,
    }
    metrics = [
        record | (known if record["kind"] == "train" else {"seconds": 3.0}) for record in finished_metrics()
    ]
    text = report(tmp_path, metrics, evaluation()).text.replace("\xa0", " ")
    for shown in (
        "5,210 tokens and 1,020 supervised positions per second",
        "1.25 s",
        "41%",
        "61.2 GB",
        "64.0 GB",
    ):
        assert shown in text
    assert "validation 33.0 s, checkpoints 400.0 s" in text
