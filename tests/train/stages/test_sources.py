"""The sources of a run."""

from pathlib import Path

import pytest

from train.config.data import DataConfig
from train.stages.sources import evaluation_sets


def test_a_recipes_list_of_evaluation_sets_is_found_from_any_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert len(evaluation_sets(DataConfig(evaluation_sets="recipes/benchmarks.yaml"))) > 1
