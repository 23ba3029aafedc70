"""Faults that are put back into the code for the time of a check."""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType
from typing import Any


@dataclass(frozen=True)
class Fault:
    """A part of a module's text, and what stands there with the fault."""

    module: str
    right: str
    wrong: str


@contextmanager
def put_back(fault: Fault) -> Iterator[None]:
    """Give the module's functions the code that they have with the fault."""
    module = importlib.import_module(fault.module)
    assert module.__file__ is not None
    source = Path(module.__file__).read_text()
    assert fault.right in source, f"{fault.module} does not have: {fault.right}"
    faulty: dict[str, Any] = {"__name__": module.__name__}
    exec(compile(source.replace(fault.right, fault.wrong), module.__file__, "exec"), faulty)
    functions, others = (dict(_functions(names, module.__name__)) for names in (vars(module), faulty))
    right = {name: function.__code__ for name, function in functions.items()}
    try:
        for name, function in functions.items():
            function.__code__ = others[name].__code__
        yield
    finally:
        for name, code in right.items():
            functions[name].__code__ = code


def _functions(names: Any, module: str) -> Iterator[tuple[str, FunctionType]]:
    """Yield the functions that a module defines and its classes' methods, by their qualified names."""
    for value in list(names.values()):
        value = value.__func__ if isinstance(value, (staticmethod, classmethod)) else value
        value = getattr(value, "__wrapped__", value)
        if isinstance(value, FunctionType) and value.__module__ == module:
            yield value.__qualname__, value
        elif isinstance(value, type) and value.__module__ == module:
            yield from _functions(vars(value), module)
