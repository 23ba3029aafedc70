"""Gradients of weights that every step of a chunk adds to.

A module is called at each step, and a step reads what the one before made. So the backward pass of the first
call comes last. Those of the other calls add to a sum in place, and the first one's returns it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor


class WeightSum:
    """The sum of one weight's gradients so far, in the form that its module adds to."""

    def __init__(self) -> None:
        self.total: Tensor | None = None

    def taken(self) -> Tensor | None:
        """Return it, of which no other reference is left."""
        total, self.total = self.total, None
        return total


class StepSums:
    """The sums of a chunk's weights."""

    def __init__(self) -> None:
        self._sums: dict[int, WeightSum] = {}

    @contextmanager
    def adding(self) -> Iterator[None]:
        """Have the modules that are called inside add to these sums."""
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)

    def of_call(self, weight: Tensor) -> tuple[WeightSum, bool]:
        """Return the weight's sum, and whether this is its first call."""
        is_first = id(weight) not in self._sums
        return self._sums.setdefault(id(weight), WeightSum()), is_first


_current: ContextVar[StepSums | None] = ContextVar("sums", default=None)


def step_sum(weight: Tensor) -> tuple[WeightSum, bool] | None:
    """Return what a call with this weight adds to, if there is any; see `StepSums.of_call`."""
    sums = _current.get()
    return None if sums is None else sums.of_call(weight)
