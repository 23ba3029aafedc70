"""What the layout promises."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LAYERS = ["eagle31", "data", "train", "scripts"]


def imported_packages(file: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: imports are absolute"
            found.add((node.module or "").split(".")[0])
    return found


@pytest.mark.parametrize("layer", LAYERS)
def test_imports_go_one_way(layer: str) -> None:
    above = set(LAYERS[LAYERS.index(layer) + 1 :]) | {"tests"}
    files = list((ROOT / layer).rglob("*.py"))
    assert files or layer == "scripts"
    for file in files:
        assert not imported_packages(file) & above, file


def test_the_model_knows_no_launcher() -> None:
    for file in (ROOT / "eagle31").rglob("*.py"):
        assert not imported_packages(file) & {"hydra", "omegaconf", "deepspeed", "wandb"}, file


def test_main_stays_short() -> None:
    assert len((ROOT / "train" / "main.py").read_text().splitlines()) < 80
