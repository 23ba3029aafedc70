"""No file from outside can run code: no call that could let it is in the code, apart from the ones here."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from eagle31.errors import UserError
from eagle31.tensor_files import load_pickled

ROOT = Path(__file__).resolve().parent.parent
# Modules whose readers unpickle, and names of functions that run what they are given.
MODULES = {"pickle", "cPickle", "cloudpickle", "dill", "joblib", "shelve", "marshal"}
RUNS_TEXT = {"eval", "exec", "compile"}
UNSAFE = {"yaml.load", "yaml.unsafe_load", "yaml.full_load", "tempfile.mktemp", "os.system", "os.popen"}
# Collectives that pickle. Only the ranks of a run are in their process group.
BETWEEN_RANKS = {"all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list"}
SEND_OBJECTS = {"train/checkpoint", "train/distributed.py", "train/trainer", "data/capture", "train/stages"}


def sources() -> Iterator[Path]:
    """Yield the project's Python files, with the commands, which have no extension."""
    for folder in ("eagle31", "data", "train", "scripts"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix == ".py" or (
                path.is_file() and not path.suffix and b"python" in path.read_bytes().partition(b"\n")[0]
            ):
                yield path


def dotted(node: ast.expr) -> str:
    return ast.unparse(node) if isinstance(node, ast.Name | ast.Attribute) else ""


def findings(tree: ast.AST, where: str) -> Iterator[str]:
    """Yield each unsafe call with its line."""
    imported = {
        f"{node.module}.{alias.name}": alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    names = {local: full for full, local in imported.items()}
    modules = {
        alias.asname: alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
        if alias.asname
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            defaults = _defaults(node)
            if defaults.get("trust_remote_code"):
                yield f"{where}:{node.lineno}: trust_remote_code is true by default"
        if not isinstance(node, ast.Call):
            continue
        name = dotted(node.func)
        first, dot, rest = names.get(name, name).partition(".")
        name = modules.get(first, first) + dot + rest
        keywords = {one.arg: ast.unparse(one.value) for one in node.keywords}
        last = name.rpartition(".")[2]
        unsafe = (
            name.split(".")[0] in MODULES
            or name in RUNS_TEXT
            or name in UNSAFE
            or (name == "torch.load" and keywords.get("weights_only") != "True")
            or keywords.get("allow_pickle", "False") != "False"
            or keywords.get("shell", "False") != "False"
            or keywords.get("trust_remote_code") == "True"
            or (last in BETWEEN_RANKS and not any(where.startswith(one) for one in SEND_OBJECTS))
        )
        if unsafe:
            yield f"{where}:{node.lineno}: {ast.unparse(node)[:80]}"


def _defaults(node: ast.FunctionDef | ast.ClassDef) -> dict[str, bool]:
    """Return which arguments of a function, or fields of a class, are True by default."""
    if isinstance(node, ast.ClassDef):
        fields = [one for one in node.body if isinstance(one, ast.AnnAssign)]
        pairs: list[tuple[str, ast.expr | None]] = [(dotted(one.target), one.value) for one in fields]
    else:
        arguments = node.args
        positional = arguments.posonlyargs + arguments.args
        start = len(positional) - len(arguments.defaults)
        pairs = [(one.arg, value) for one, value in zip(positional[start:], arguments.defaults, strict=True)]
        pairs += [(one.arg, v) for one, v in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)]
    return {name: isinstance(v, ast.Constant) and v.value is True for name, v in pairs}


def test_no_unsafe_call_is_in_the_code() -> None:
    paths = list(sources())
    assert len(paths) > 300
    found = [
        line
        for path in paths
        for line in findings(ast.parse(path.read_bytes()), path.relative_to(ROOT).as_posix())
    ]
    assert not found


@pytest.mark.parametrize(
    "code",
    [
        "import pickle\npickle.load(file)",
        "from pickle import loads\nloads(data)",
        "import dill as d\nd.load(file)",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "from torch import load\nload(path)",
        "np.load(path, allow_pickle=True)",
        "yaml.load(text)",
        "eval(text)",
        "subprocess.run(command, shell=True)",
        "AutoModel.from_pretrained(name, trust_remote_code=True)",
        "def read(path, trust_remote_code=True): ...",
        "class Spec:\n    trust_remote_code: bool = True",
        "tempfile.mktemp()",
        "dist.all_gather_object(all, one)",
    ],
)
def test_each_unsafe_call_is_found(code: str) -> None:
    assert list(findings(ast.parse(code), "eagle31/file.py"))


def test_recipes_that_trust_a_targets_code_are_known() -> None:
    """Those of targets that transformers does not implement."""
    trusting = [
        path.stem
        for path in (ROOT / "recipes").rglob("*.yaml")
        if "trust_remote_code: true" in path.read_text()
    ]
    assert sorted(trusting) == ["kimi_k2_5", "kimi_k2_6"]


class Poison:
    """Creates a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return Path.touch, (self.mark,)  # type: ignore[return-value]


def test_a_poisoned_file_runs_nothing(tmp_path: Path) -> None:
    mark, path = tmp_path / "code-has-run", tmp_path / "weights.bin"
    torch.save({"fc.weight": torch.ones(2), "poison": Poison(mark)}, path)
    with pytest.raises(UserError, match="file="):
        load_pickled(path)
    assert not mark.exists()
    torch.load(path, weights_only=False)
    assert mark.exists(), "the file does run code where it is let"
