"""What pyproject.toml says is true: which packages the maths needs, and which commands are checked."""

import re
import subprocess
import sys
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "pyproject.toml").read_text()
IMPORT_ALL = """
import importlib, pkgutil, sys
for name in {refused!r}:
    sys.modules[name] = None  # an import of it fails
import {package}
names = [one.name for one in pkgutil.walk_packages({package}.__path__, "{package}.")]
for name in names:
    importlib.import_module(name)
print(len(names))
"""


def modules_of_extra(extra: str) -> set[str]:
    """Return the top-level modules of the packages that an extra of pyproject.toml lists."""
    text = (ROOT / "pyproject.toml").read_text()
    [section] = re.findall(rf"^{extra} = \[$(.*?)^\]$", text, re.MULTILINE | re.DOTALL)
    names = {name.lower() for name in re.findall(r'"([\w-]+)', section)}
    return {
        module
        for module, distributions in packages_distributions().items()
        if names & {name.lower() for name in distributions}
    }


def import_all(package: str, refused: set[str]) -> subprocess.CompletedProcess[str]:
    code = IMPORT_ALL.format(refused=sorted(refused), package=package)
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)


def test_the_maths_needs_none_of_a_runs_packages() -> None:
    refused = modules_of_extra("train")
    assert {"deepspeed", "hydra", "transformers", "wandb", "tqdm"} <= refused
    done = import_all("eagle31", refused | {"data", "train"})
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 20, "modules were imported"


@pytest.mark.parametrize("setting", ["extend-include", "files"])
def test_every_python_command_is_linted_and_type_checked(setting: str) -> None:
    """Commands have no extension, so that ruff and mypy find only those that pyproject.toml names."""
    [listed] = re.findall(rf"^{setting} = \[$(.*?)^\]$", TEXT, re.MULTILINE | re.DOTALL)
    named = {name for name in re.findall(r'"([^"]+)"', listed) if name.startswith("scripts/")}
    files = [path for path in (ROOT / "scripts").rglob("*") if path.is_file() and not path.suffix]
    commands = [path for path in files if b"python" in path.read_bytes().partition(b"\n")[0]]
    assert len(commands) > 10
    assert named == {str(path.relative_to(ROOT)) for path in commands}
