"""A switch that has `torch.compile` make one kernel of each chain of memory-bound operations.

It concerns rotary embedding, SwiGLU, and merging the rollout's keys into attention. RMSNorm on a GPU is one
kernel already.
"""

from collections.abc import Callable
from functools import cache, wraps
from typing import ParamSpec, TypeVar

import torch

_P = ParamSpec("_P")
_R = TypeVar("_R")

# Each number of rollout keys and each dtype is a graph.
MAX_GRAPHS = 64
_backend: str | None = None


def use_compiled(backend: str | None = "inductor") -> None:
    """Compile the functions that are marked as `compilable` when they are called; None: run them as they are.

    This holds for the whole process. Results differ from those without it in rounding only.
    """
    global _backend
    _backend = backend
    if backend is not None:
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, MAX_GRAPHS)


def uses_compiled() -> bool:
    """Return whether `compilable` functions are compiled."""
    return _backend is not None


def compilable(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Mark a function of tensors that changes none of its arguments and reads nothing from the device."""

    @wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if _backend is None:
            return function(*args, **kwargs)
        return _compiled(function, _backend)(*args, **kwargs)

    return call


@cache
def _compiled(function: Callable[_P, _R], backend: str) -> Callable[_P, _R]:
    return torch.compile(function, backend=backend, dynamic=True, fullgraph=True)
