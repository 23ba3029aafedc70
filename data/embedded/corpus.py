"""Chat examples from the standard library: a signature with its docstring, and the function as the answer."""

import ast
import hashlib
import os
import sysconfig
import textwrap
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias, TypedDict

from eagle31.errors import UserError

# Tk's modules are missing from many installations. Where they exist, a small model first learns their
# thousand one-line calls of `self.tk.call`.
TK_MODULES = frozenset({"idlelib", "tkinter", "turtledemo", "turtle.py"})
SKIPPED = TK_MODULES | {"__pycache__", "dist-packages", "lib2to3", "site-packages", "test", "tests"}
# Longer bodies are a tenth of the functions but half of the text, and a short run learns more without them.
MAX_BODY_CHARACTERS = 800
HELD_OUT_PERCENT = 5

FunctionNode: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef


class Message(TypedDict):
    """One turn of an example."""

    role: str
    content: str


class ChatExample(TypedDict):
    """One line of the training and held-out files: a request and its answer."""

    id: str
    messages: list[Message]


@dataclass(frozen=True)
class Corpus:
    """The two sides of the split; every function body occurs once in one of them."""

    train: list[ChatExample]
    held_out: list[ChatExample]


def standard_library() -> Path:
    """Return the directory with the source of the running Python's library."""
    return Path(sysconfig.get_paths()["stdlib"])


def python_files(source: Path) -> list[Path]:
    """List the modules below `source` in a fixed order, without tests, Tk and installed packages."""
    found = []
    for directory, subdirectories, files in os.walk(source):
        subdirectories[:] = sorted(set(subdirectories) - SKIPPED)
        found += [Path(directory, name) for name in sorted(set(files) - SKIPPED) if name.endswith(".py")]
    return found


def read_corpus(source: Path) -> Corpus:
    """Read the documented functions and methods below `source`, deduplicated and split by their bodies.

    Raises:
        UserError: one of the two sides would be empty.
    """
    corpus = Corpus([], [])
    bodies: set[str] = set()
    for path in python_files(source):
        module = path.relative_to(source).with_suffix("").as_posix().replace("/", ".")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # invalid escapes in the library's modules
                tree = ast.parse(path.read_bytes())
        except (OSError, SyntaxError, ValueError):
            continue
        for function, owners in _definitions(tree.body, ()):
            found = _example(module, function, owners)
            if found is not None and found[0] not in bodies:
                body, example = found
                bodies.add(body)
                (corpus.held_out if is_held_out(body) else corpus.train).append(example)
    if not corpus.train or not corpus.held_out:
        raise UserError(
            "source",
            source,
            "It has too few documented Python functions to train on; use a Python that is installed with the "
            "source of its library (.py files), or set target.model to another model.",
        )
    return corpus


def is_held_out(body: str) -> bool:
    """Return the side of the split, which depends only on the body: copies are on the same side."""
    return int.from_bytes(hashlib.sha256(body.encode()).digest()[:8], "big") % 100 < HELD_OUT_PERCENT


def _definitions(
    statements: list[ast.stmt], owners: tuple[str, ...]
) -> Iterator[tuple[FunctionNode, tuple[str, ...]]]:
    """Yield the functions of a module and the methods of its classes, with the names of their classes."""
    for statement in statements:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            yield statement, owners
        elif isinstance(statement, ast.ClassDef):
            yield from _definitions(statement.body, (*owners, statement.name))


def _example(module: str, function: FunctionNode, owners: tuple[str, ...]) -> tuple[str, ChatExample] | None:
    """Return a documented function's body without its docstring, and the example; None if it is not usable.

    The answer repeats the signature, because a model first learns to copy a prompt.
    """
    documentation = ast.get_docstring(function)
    if not documentation or len(function.body) < 2:
        return None
    # Unparsing removes comments and unifies quotes and line breaks, which is easier for a small model.
    body = "\n".join(ast.unparse(statement) for statement in function.body[1:])
    if body == "pass" or len(body) > MAX_BODY_CHARACTERS:
        return None
    keyword = "async def" if isinstance(function, ast.AsyncFunctionDef) else "def"
    returns = f" -> {ast.unparse(function.returns)}" if function.returns else ""
    signature = f"{keyword} {function.name}({ast.unparse(function.args)}){returns}:"
    summary = documentation.split("\n\n")[0].strip()
    request = ["Write this function.", "", *([f"# class {'.'.join(owners)}"] if owners else []), signature]
    request.append(textwrap.indent(f'"""{summary}"""', "    "))
    messages = [
        Message(role="user", content="\n".join(request)),
        Message(role="assistant", content=f"{signature}\n{textwrap.indent(body, '    ')}"),
    ]
    name = ".".join((*owners, function.name))
    return body, ChatExample(id=f"{module}:{name}:{function.lineno}", messages=messages)
