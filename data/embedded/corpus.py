"""Chat examples from the standard library: a signature with its docstring, and the function as the answer."""

import ast
import gc
import hashlib
import os
import sysconfig
import textwrap
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias, TypedDict

from eagle31.errors import UserError

# Tk's modules are missing from many installations. Where they exist, a small model first learns their
# thousand one-line calls of `self.tk.call`.
TK_MODULES = frozenset({"idlelib", "tkinter", "turtledemo", "turtle.py"})
SKIPPED = TK_MODULES | {"__pycache__", "dist-packages", "lib2to3", "site-packages", "test", "tests"}
REQUEST = "Write this function."
# Longer bodies are a tenth of the functions but half of the text, and a short run learns more without them.
MAX_BODY_CHARACTERS = 800
HELD_OUT_PERCENT = 5
INDENT = "    "

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
    with _without_garbage_collection():
        for path in python_files(source):
            module = path.relative_to(source).with_suffix("").as_posix().replace("/", ".")
            for function in _functions(path):
                if function.body in bodies:
                    continue
                bodies.add(function.body)
                side = corpus.held_out if is_held_out(function.body) else corpus.train
                side.append(_example(module, function))
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


@dataclass(frozen=True)
class Function:
    """A documented function with normalized code."""

    name: str
    owners: tuple[str, ...]  # the classes around it, outermost first
    line: int
    signature: str
    summary: str  # the docstring's first paragraph
    body: str  # without the docstring, not indented


def _example(module: str, function: Function) -> ChatExample:
    """Make the example; its answer repeats the signature, because a model first learns to copy a prompt."""
    summary = textwrap.indent(f'"""{function.summary}"""', INDENT).splitlines()
    request = [REQUEST, "", function.signature, *summary]
    if function.owners:
        request.insert(2, f"# class {'.'.join(function.owners)}")
    answer = f"{function.signature}\n{textwrap.indent(function.body, INDENT)}"
    user = Message(role="user", content="\n".join(request))
    name = ".".join((*function.owners, function.name))
    return ChatExample(
        id=f"{module}:{name}:{function.line}", messages=[user, Message(role="assistant", content=answer)]
    )


def _functions(path: Path) -> Iterator[Function]:
    """Yield the usable functions of one file, and none if it cannot be read or parsed."""
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return
    for function, owners in _definitions(tree.body, ()):
        documentation = ast.get_docstring(function)
        if not documentation or len(function.body) < 2:
            continue
        # Unparsing removes comments and unifies quotes and line breaks, which is easier for a small model.
        body = "\n".join(ast.unparse(statement) for statement in function.body[1:])
        if body == "pass" or len(body) > MAX_BODY_CHARACTERS:
            continue
        keyword = "async def" if isinstance(function, ast.AsyncFunctionDef) else "def"
        returns = f" -> {ast.unparse(function.returns)}" if function.returns else ""
        yield Function(
            name=function.name,
            owners=owners,
            line=function.lineno,
            signature=f"{keyword} {function.name}({ast.unparse(function.args)}){returns}:",
            summary=documentation.split("\n\n")[0].strip(),
            body=body,
        )


def _definitions(
    statements: list[ast.stmt], owners: tuple[str, ...]
) -> Iterator[tuple[FunctionNode, tuple[str, ...]]]:
    """Yield the functions of a module and the methods of its classes, with the names of their classes."""
    for statement in statements:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            yield statement, owners
        elif isinstance(statement, ast.ClassDef):
            yield from _definitions(statement.body, (*owners, statement.name))


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Pause cyclic garbage collection: walking hundreds of syntax trees then takes a quarter of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in the library's modules
            yield
    finally:
        if was_enabled:
            gc.enable()
