"""What pyproject.toml says is true: which packages the maths needs, and which commands are checked."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "pyproject.toml").read_text()


@pytest.mark.parametrize("setting", ["extend-include", "files"])
def test_every_python_command_is_linted_and_type_checked(setting: str) -> None:
    """Commands have no extension, so that ruff and mypy find only those that pyproject.toml names."""
    [listed] = re.findall(rf"^{setting} = \[$(.*?)^\]$", TEXT, re.MULTILINE | re.DOTALL)
    named = {name for name in re.findall(r'"([^"]+)"', listed) if name.startswith("scripts/")}
    files = [path for path in (ROOT / "scripts").rglob("*") if path.is_file() and not path.suffix]
    commands = [path for path in files if b"python" in path.read_bytes().partition(b"\n")[0]]
    assert len(commands) > 10
    assert named == {str(path.relative_to(ROOT)) for path in commands}
