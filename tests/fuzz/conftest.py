"""A fixture that runs of tests/train share."""

from tests.train.conftest import small_target

__all__ = ["small_target"]
