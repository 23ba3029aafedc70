"""Fixtures with a tiny embedded target."""

from pathlib import Path

import pytest

from data.embedded.target import EmbeddedTarget
from tests.data.embedded.tiny_embedded import ensure, write_library


@pytest.fixture(scope="package")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("library")
    write_library(root)
    return root


@pytest.fixture(scope="package")
def built(library: Path, tmp_path_factory: pytest.TempPathFactory) -> EmbeddedTarget:
    return ensure(tmp_path_factory.mktemp("cache"), library)
