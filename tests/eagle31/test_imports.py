"""eagle31 needs PyTorch and safetensors, and no other package."""

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ALLOWED = {"eagle31", "torch", "safetensors"}


def imported_packages(file: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            found.add(node.module.split(".")[0])
    return found


def test_it_imports_torch_and_safetensors_alone() -> None:
    files = list((ROOT / "eagle31").rglob("*.py"))
    packages = set().union(*(imported_packages(file) for file in files))
    assert packages >= ALLOWED
    assert packages - sys.stdlib_module_names == ALLOWED
