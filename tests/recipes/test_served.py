"""The table of what engines serve with EAGLE 3 is that of their sources, and docs/recipes.md has it."""

import re
from pathlib import Path

import pytest

from data.target.served import engines
from tests.recipes.served import served_architectures, table_rows
from tests.runs.forked import ROOT


def test_the_page_has_the_table() -> None:
    page = (ROOT / "docs" / "recipes.md").read_text()
    for row in table_rows(engines()):
        assert row in page


def test_the_table_is_for_the_version_that_is_installed() -> None:
    [version] = re.findall(r"(?m)^vllm_version=(.+)$", (ROOT / "scripts" / "setup" / "vllm").read_text())
    assert f"vLLM {version}" in engines()


@pytest.mark.full("imports all models of vLLM, and downloads SGLang")
def test_the_table_is_that_of_the_engines(vllm_python: Path) -> None:
    assert served_architectures(vllm_python) == engines()
