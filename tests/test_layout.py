"""What the layout promises: imports go one way, between the packages and between the folders of a package."""

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ["eagle31", "data", "train"]


def imported_modules(file: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: imports are absolute"
            assert node.module is not None
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def python_files(package: str) -> list[Path]:
    files = [file for file in (ROOT / package).rglob("*.py") if file.name != "__init__.py"]
    assert files
    return files


def room_of(module: str) -> str | None:
    """The folder that holds a module of ours, or the module itself where it is at its package's top."""
    path = ROOT.joinpath(*module.split("."))
    if path.with_suffix(".py").is_file():
        folder = path.parent
        return str(path.relative_to(ROOT) if folder.parent == ROOT else folder.relative_to(ROOT))
    if (path / "__init__.py").is_file() and path.parent != ROOT:
        return str(path.relative_to(ROOT))
    return None


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_go_one_way_between_packages(package: str) -> None:
    above = {*PACKAGES[PACKAGES.index(package) + 1 :], "scripts", "tests"}
    for file in python_files(package):
        assert not {module.split(".")[0] for module in imported_modules(file)} & above, file


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_go_one_way_between_folders(package: str) -> None:
    graph: dict[str, set[str]] = {}
    for file in python_files(package):
        module = ".".join(file.relative_to(ROOT).with_suffix("").parts)
        room = room_of(module)
        assert room is not None
        rooms = {room_of(name) for name in imported_modules(file) if name.split(".")[0] == package}
        graph.setdefault(room, set()).update(name for name in rooms if name not in (None, room))
    assert any(graph.values()), "no import was found"
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(reversed(error.args[1])))


def test_the_model_knows_no_launcher() -> None:
    for file in python_files("eagle31"):
        packages = {module.split(".")[0] for module in imported_modules(file)}
        assert not packages & {"hydra", "omegaconf", "deepspeed", "wandb", "transformers"}, file
