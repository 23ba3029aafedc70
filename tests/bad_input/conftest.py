"""Fixtures of the tables of bad input."""

import pytest

from tests.train.conftest import captured, finished, small_target

__all__ = ["captured", "finished", "small_target"]  # fixtures that runs of tests/train share


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
