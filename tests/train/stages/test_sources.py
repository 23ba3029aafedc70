"""The sources of a run."""

from pathlib import Path

import pytest
from datasets import Dataset

from data.conversations import files
from train.config.data import DataConfig, SourceConfig
from train.stages.sources import evaluation_sets, evaluation_source, training_sources


def test_a_recipes_list_of_evaluation_sets_is_found_from_any_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert len(evaluation_sets(DataConfig(evaluation_sets="recipes/benchmarks.yaml"))) > 1


def test_a_revision_of_a_hub_dataset_and_the_limit_of_malformed_rows_are_settings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loaded = []
    monkeypatch.setattr(files, "check_hub", lambda *_: None)

    def load_dataset(name: str, *_: object, **given: object) -> Dataset:
        loaded.append((name, given))
        return Dataset.from_dict({"text": []})

    monkeypatch.setattr(files, "load_dataset", load_dataset)

    def located(source: str, evaluation: bool) -> str:
        return source

    given = {"max_malformed_fraction": 0.2, "evaluation_sets": "recipes/benchmarks.yaml"}
    data = DataConfig(train="a/b", eval="c/d", revision="one", eval_revision="two", **given)
    several = DataConfig(train=None, sources={"x": SourceConfig(source="e/f", revision="three")}, **given)
    sources = [*training_sources(data, located).values(), evaluation_source(data, located)]
    sources += training_sources(several, located).values()
    assert [list(one.rows()) for one in sources] == [[], [], []]
    assert [(name, one["revision"]) for name, one in loaded] == [
        ("a/b", "one"),
        ("c/d", "two"),
        ("e/f", "three"),
    ]
    limits = {one.max_malformed_fraction for one in [*sources, *evaluation_sets(data).values()]}
    assert limits == {0.2}
