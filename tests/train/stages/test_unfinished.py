"""Stages that have no result and are not selected; tests/bad_input/test_results.py has damaged results."""

from pathlib import Path

import pytest

from data.embedded.target import EmbeddedTarget
from eagle31.errors import UserError
from tests.train.small_run import RECIPE, arguments
from tests.train.torchrun import run_here


def test_a_missing_stage_is_named(small_target: EmbeddedTarget, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="'data'") as caught:
        run_here(RECIPE, *arguments(small_target, tmp_path), "stages=[train]")
    assert caught.value.field == "stages"
