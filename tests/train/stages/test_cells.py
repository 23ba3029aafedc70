"""The robustness matrix in a run: its cells, what is reused, and what is left out."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from data.embedded.target import EmbeddedTarget
from eagle31.errors import UserError
from eagle31.json_files import read_json, read_jsonl
from tests.fuzz.damage import flip
from tests.train.small_run import RECIPE, arguments
from tests.train.torchrun import composed, run_here
from train.config.run import Stage, check, needed_stages, selected_stages
from train.evaluation.cells import finished_cells
from train.planning.work import cell_tokens


def matrix(other: Path, templates: str = "plain") -> list[str]:
    return [
        "evaluate.matrix.domains.own.num_prompts=6",
        f"evaluate.matrix.domains.other.source={other}",
        "evaluate.matrix.domains.other.category_column=kind",
        "evaluate.matrix.domains.other.num_prompts=2",
        f"evaluate.matrix.templates=[{templates}]",
        "evaluate.matrix.systems=[none]",
        "evaluate.matrix.context_tokens=[100,4000]",
    ]


def cells_of(directory: Path) -> dict[str, dict[str, Any]]:
    found = [read_json(path) for path in directory.glob("artifacts/evaluate-*/evaluation.json")]
    [newest] = [one for one in found if one["matrix"] and len(one["matrix"]["cells"]) == max_cells(found)]
    assert newest["matrix"]["k"] == newest["k"]
    return {cell["name"]: cell for cell in newest["matrix"]["cells"]}


def max_cells(found: list[dict[str, Any]]) -> int:
    return max(len(one["matrix"]["cells"]) for one in found if one["matrix"])


@pytest.fixture(scope="module")
def other(small_target: EmbeddedTarget, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prompts of two kinds; one prompt is in the training data."""
    trained = read_jsonl(Path(small_target.train))[0]
    rows = [{"turns": [f"Write the function number {n}."], "kind": ("even", "odd")[n % 2]} for n in range(4)]
    content = next(one["content"] for one in trained["messages"] if one["role"] == "user")
    rows.append({"turns": [content], "kind": "even"})
    path = tmp_path_factory.mktemp("other") / "other.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def test_the_matrix_of_a_run(
    small_target: EmbeddedTarget,
    finished: tuple[Path, str],
    other: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    directory = tmp_path / "run"
    shutil.copytree(finished[0], directory, symlinks=True)
    shared = arguments(small_target, directory)
    [before] = [read_json(path) for path in directory.glob("artifacts/evaluate-*/evaluation.json")]
    passes = {path: path.stat().st_mtime_ns for path in directory.glob("artifacts/evaluate-*/passes/*")}
    assert before["matrix"] is None
    assert finished_cells(directory) == []

    run_here(RECIPE, *shared, *matrix(other), "stages=[evaluate,report]")
    printed = capsys.readouterr().out
    assert "other.even: 1 prompts are left out, because they are in the training data" in printed
    assert "own/context_4000 is left out" in printed
    assert "own/system_none is left out: The prompt is the same" in printed
    cells = cells_of(directory)
    domains = ("own", "other.even", "other.odd")
    assert set(cells) == {f"{one}{suffix}" for one in domains for suffix in ("", "/plain", "/context_100")}
    # The same prompts and completions as the test prompts of the run: the figures are the same.
    assert cells["own"]["by_prompt"] == before["trained"]["by_prompt"]
    assert cells["own"]["num_prompts"] == cells["own/plain"]["num_prompts"] == 6
    # Prompts of more than 100 tokens are not lengthened.
    assert 0 < cells["own/context_100"]["num_prompts"] < 6
    for name, cell in cells.items():
        assert [row["k"] for row in cell["by_draft_length"]] == list(range(1, 9))
        assert all((row["ratio"] is None) == ("/" not in name) for row in cell["by_draft_length"])
    assert 90 < cells["own/context_100"]["mean_prompt_tokens"] < 170
    # What the evaluation had measured without a matrix is not measured again.
    assert all(path.stat().st_mtime_ns == modified for path, modified in passes.items())

    artifacts = {path: path.stat().st_mtime_ns for path in directory.glob("artifacts/cell-*/stage.json")}
    assert len(artifacts) == len(cells) == len(finished_cells(directory))
    altered = min(directory.glob("artifacts/cell-*/prompts/data-*.arrow"))
    flip(altered)
    run_here(RECIPE, *shared, *matrix(other, "plain,renamed_roles"), "stages=[cells,evaluate,report]")
    assert f"cells: made again, because {altered} was altered" in capsys.readouterr().out
    more = cells_of(directory)
    assert set(more) - set(cells) == {f"{one}/renamed_roles" for one in domains}
    assert {name: more[name]["by_prompt"] for name in cells} == {
        name: cell["by_prompt"] for name, cell in cells.items()
    }
    assert [path for path, modified in artifacts.items() if path.stat().st_mtime_ns != modified] == [
        altered.parents[1] / "stage.json"
    ]


def test_names_and_sources_are_checked_before_any_stage(
    small_target: EmbeddedTarget, other: Path, tmp_path: Path
) -> None:
    shared = arguments(small_target, tmp_path / "run")
    for extra, field in (
        ("evaluate.matrix.domains.other.source=nothing.jsonl", "evaluate.matrix.domains.other.source"),
        ("evaluate.matrix.domains.other.category_column=nothing", "evaluate.matrix.domains.other.source"),
        ("evaluate.matrix.validation_cells=[own/nothing]", "evaluate.matrix.validation_cells"),
    ):
        with pytest.raises(UserError) as raised:
            run_here(RECIPE, *shared, *matrix(other), extra)
        assert raised.value.field == field
    assert not list(tmp_path.glob("run/artifacts/*"))


def test_cells_are_made_where_they_are_measured() -> None:
    base = composed("quickstart")
    assert Stage.cells not in selected_stages(base)
    assert Stage.cells not in needed_stages(base)
    robust = composed("quickstart", "eval=robustness", "stages=[evaluate]")
    assert selected_stages(robust) == [Stage.cells, Stage.evaluate]
    assert Stage.cells in needed_stages(robust)
    # The base cell, four templates and four system prompts with the recipe's longest samples; two lengths.
    assert cell_tokens(robust) == 32 * (9 * (512 + 96) + 1024 + 96 + 4096 + 96)
    assert cell_tokens(base) == 0
    trained = composed("quickstart", "eval=robustness", "stages=[train]")
    assert selected_stages(trained) == [Stage.train]
    assert Stage.cells not in needed_stages(trained)
    chosen = "evaluate.matrix.validation_cells=[held_out/plain]"
    trained = composed("quickstart", "eval=robustness", "stages=[train]", chosen)
    assert selected_stages(trained) == [Stage.cells, Stage.train]
    with pytest.raises(UserError, match="There are no cells"):
        check(composed("quickstart", "stages=[cells]"))
