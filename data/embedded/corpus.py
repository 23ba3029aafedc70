"""Conversations from the standard library: a signature and its docstring, and the function as the answer."""

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

# Tk's modules are missing from many installations, and elsewhere their thousand one-line calls of
# `self.tk.call` are what a small model learns before all else.
TK_MODULES = frozenset({"idlelib", "tkinter", "turtledemo", "turtle.py"})
SKIPPED = TK_MODULES | {"__pycache__", "dist-packages", "lib2to3", "site-packages", "test", "tests"}
REQUEST = "Write this function."
# Longer bodies are a tenth of the functions and half of the text: a short run learns more without them.
MAX_BODY_CHARACTERS = 800
HELD_OUT_PERCENT = 5
INDENT = "    "

FunctionNode: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef


class Message(TypedDict):
    """One turn."""

    role: str
    content: str


class ChatExample(TypedDict):
    """One line of the files that are trained on."""

    id: str
    messages: list[Message]


@dataclass(frozen=True)
class Corpus:
    """The two sides of the split; no body occurs on both, and none twice."""

    train: list[ChatExample]
    held_out: list[ChatExample]


def standard_library() -> Path:
    """Where the running Python keeps its library's source."""
    return Path(sysconfig.get_paths()["stdlib"])


def python_files(source: Path) -> list[Path]:
    """Every module below `source` but tests, Tk and what was installed on top, in a fixed order."""
    found = []
    for directory, subdirectories, files in os.walk(source):
        subdirectories[:] = sorted(set(subdirectories) - SKIPPED)
        found += [Path(directory, name) for name in sorted(set(files) - SKIPPED) if name.endswith(".py")]
    return found


def read_corpus(source: Path) -> Corpus:
    """Documented functions and methods below `source`, deduplicated and split by their bodies.

    Raises:
        UserError: no documented function is left for one of the two sides.
    """
    corpus = Corpus([], [])
    bodies: set[str] = set()
    with _many_small_objects():
        for path in python_files(source):
            module = path.relative_to(source).with_suffix("").as_posix().replace("/", ".")
            for function in _functions(path):
                if function.body in bodies:
                    continue
                bodies.add(function.body)
                side = corpus.held_out if is_held_out(function.body) else corpus.train
                side.append(_conversation(module, function))
    if not corpus.train or not corpus.held_out:
        raise UserError(
            "source",
            source,
            "holds too few documented Python functions to train on; use a Python installed with its "
            "library's source (.py files), or name a target model of your own.",
        )
    return corpus


def is_held_out(body: str) -> bool:
    """The side of the split, from nothing but the body, so that a copy of it lands on the same one."""
    return int.from_bytes(hashlib.sha256(body.encode()).digest()[:8], "big") % 100 < HELD_OUT_PERCENT


@dataclass(frozen=True)
class Function:
    """A documented function, its code normalised."""

    name: str
    owners: tuple[str, ...]  # the classes around it, outermost first
    line: int
    signature: str
    summary: str  # the docstring's first paragraph
    body: str  # without the docstring, not indented


def _conversation(module: str, function: Function) -> ChatExample:
    """The answer repeats the signature: to copy is the first use of a prompt that a model learns."""
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
    """Every usable function of one file; none from an unreadable file."""
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return
    for function, owners in _definitions(tree.body, ()):
        documentation = ast.get_docstring(function)
        if not documentation or len(function.body) < 2:
            continue
        # Unparsing drops comments and gives one style of quotes and line breaks: easier for a small model.
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
    """Functions of a module and methods of its classes, with the names of the classes around them."""
    for statement in statements:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            yield statement, owners
        elif isinstance(statement, ast.ClassDef):
            yield from _definitions(statement.body, (*owners, statement.name))


@contextmanager
def _many_small_objects() -> Iterator[None]:
    """Without cyclic collection a walk over hundreds of syntax trees takes a quarter of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in other people's modules
            yield
    finally:
        if was_enabled:
            gc.enable()
