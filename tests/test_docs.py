"""The pages have no broken link, and their commands name scripts, recipes and keys that exist."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_layout import ROOT
from train.config.compose import FREE_FORM, schema_keys

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
CLUSTERS = sorted((ROOT / "scripts/cluster").glob("*.yaml"))


def test_the_site_builds_strictly_and_loads_nothing_from_other_hosts(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", str(ROOT / "mkdocs.yml")]
    done = subprocess.run(
        [*command, "--site-dir", str(tmp_path / "site")],
        capture_output=True,
        text=True,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
    )
    assert done.returncode == 0, done.stderr
    pages = sorted((tmp_path / "site").rglob("index.html"))
    assert len(pages) == len(PAGES) - 2  # all but README and CONTRIBUTING
    for page in pages:
        loaded = re.findall(
            r'(?:<script[^>]*src|<img[^>]*src|<link[^>]*href)="(https?:[^"]*)"', page.read_text()
        )
        assert not loaded, page


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_links_outside_the_site_name_files(page: str) -> None:
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", (ROOT / page).read_text())
    local = [link for link in links if not link.startswith("http")]
    assert local or page == "CONTRIBUTING.md"
    for link in local:
        assert (ROOT / link).is_file(), link


def code(page: Path) -> str:
    """Return the code of a page: indented and fenced blocks, and inline code."""
    text = page.read_text()
    blocks = re.findall(r"(?m)^(?: {4}|\t)\S.*$", text) + re.findall(r"(?s)^```.*?^```", text)
    return "\n".join([*blocks, *re.findall(r"`([^`\n]+)`", text)])


@pytest.mark.parametrize("page", [*PAGES, *CLUSTERS], ids=lambda page: page.name)
def test_commands_name_what_exists(page: Path) -> None:
    text = code(page) if page.suffix == ".md" else page.read_text()
    for name in re.findall(r"(?<![\w/])(scripts/[\w/]+\w(?:\.(?:py|sh|yaml))?)", text):
        assert (ROOT / name).exists(), name
    for name in re.findall(r"(?<![\w/])((?:train|data|eagle31|tests)/[\w/]+\.py)", text):
        assert (ROOT / name).is_file(), name
    for name in re.findall(r"\brecipe=([a-z]\w+)", text):
        assert (ROOT / "recipes" / "recipe" / f"{name}.yaml").is_file(), name
    for group, name in re.findall(r"(?<![\w.-])([a-z]+)=([a-z]\w+)", text):
        if (ROOT / "recipes" / group).is_dir() and group != "recipe":
            assert (ROOT / "recipes" / group / f"{name}.yaml").is_file(), f"{group}={name}"
    known = dict(schema_keys())
    for key in re.findall(r"(?<![\w.-])([a-z]\w*(?:\.\w+)+)=", text):
        free = any(key.startswith(f"{name}.") for name in FREE_FORM)
        assert free or key in known, key
