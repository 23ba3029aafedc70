"""Times of decoding steps by draft length: measured by `scripts/bench/serving`, or given by the user."""

import math
from bisect import bisect_left
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import yaml

from eagle31.errors import UserError
from train.resampling.bootstrap import Floats

Milliseconds: TypeAlias = tuple[float, ...]

_TOLERANCE = 0.1  # noise of a quiet machine
_KEYS = {"concurrency", "target_ms", "verify_ms", "draft_ms", "overhead_ms"}
_EXAMPLE = "{concurrency: 1, target_ms: 21.0, verify_ms: {4: 22.5, 8: 24.1}, draft_ms: 1.2}"


@dataclass(frozen=True)
class StepTimes:
    """Times of decoding steps at one concurrency, a value for each of R rounds.

    In a step the target verifies the drafts of all sequences, and the drafter proposes the next ones. The
    values of a round were measured together.
    """

    concurrency: int
    plain: Milliseconds  # the step of an engine without a drafter
    steps: dict[int, Milliseconds]  # by draft length
    drafting: dict[int, Milliseconds] = field(
        default_factory=dict
    )  # the drafter's part of a step, where known

    @property
    def draft_lengths(self) -> list[int]:
        return sorted(self.steps)

    def covers(self, k: int) -> bool:
        """Return whether the draft length is within the range of those with known times."""
        return k == 0 or self.draft_lengths[0] <= k <= self.draft_lengths[-1]

    def at(self, k: int) -> Floats:
        """Return the milliseconds of a step. [R]

        Between draft lengths with known times they are interpolated; outside of these, the line through the
        two nearest is continued, but no step is shorter than without a drafter.
        """
        if k == 0:
            return np.array(self.plain)
        found = _on_line(k, self.draft_lengths, self.steps)
        return found if self.covers(k) else np.maximum(found, self.plain)

    def contradictions(self) -> list[tuple[int, int]]:
        """Return neighbouring draft lengths of which the longer one has a clearly shorter step."""
        middle = {0: np.median(self.plain)} | {k: np.median(self.steps[k]) for k in self.draft_lengths}
        return [(a, b) for a, b in pairwise(middle) if middle[b] < (1 - _TOLERANCE) * middle[a]]

    def interpolation_error(self) -> float | None:
        """Return the largest relative error of a step that is interpolated although its time is known.

        None where only two draft lengths have known times.
        """
        known = self.draft_lengths
        errors = []
        for k in known[1:-1]:
            others = [one for one in known if one != k]
            guess = np.median(_on_line(k, others, self.steps))
            errors.append(abs(float(guess / np.median(self.steps[k])) - 1))
        return max(errors, default=None)

    def to_json(self) -> dict[str, Any]:
        drafts = [
            {"k": k, "step_ms": list(self.steps[k]), "draft_ms": list(self.drafting[k])}
            if k in self.drafting
            else {"k": k, "step_ms": list(self.steps[k])}
            for k in self.draft_lengths
        ]
        return {"concurrency": self.concurrency, "plain_ms": list(self.plain), "drafts": drafts}

    @staticmethod
    def from_json(raw: dict[str, Any]) -> "StepTimes":
        return StepTimes(
            raw["concurrency"],
            tuple(raw["plain_ms"]),
            {one["k"]: tuple(one["step_ms"]) for one in raw["drafts"]},
            {one["k"]: tuple(one["draft_ms"]) for one in raw["drafts"] if "draft_ms" in one},
        )


def _on_line(k: int, known: list[int], steps: dict[int, Milliseconds]) -> Floats:
    """Return the times at k on the line through the two nearest of the known draft lengths. [R]"""
    assert len(known) > 1
    right = min(max(bisect_left(known, k), 1), len(known) - 1)
    low, high = known[right - 1], known[right]
    below, above = np.array(steps[low]), np.array(steps[high])
    return below + (above - below) * (k - low) / (high - low)


def read_times(file: Path) -> list[StepTimes]:
    """Read the user's own times from YAML or JSON: a list with an entry for each concurrency.

    `target_ms` is a decoding step without a drafter, `verify_ms` the target's forward pass over drafts by
    their length, `draft_ms` the drafter's time for one token of a draft, and `overhead_ms`, which may be left
    out, everything else in a step. All are milliseconds for as many sequences as `concurrency` says.

    Raises:
        UserError: the file does not exist or has something else.
    """
    if not file.is_file():
        raise UserError("--times", file, "No such file.")
    try:
        entries = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        raise UserError("--times", file, f"It is neither YAML nor JSON ({reason}).") from error
    if not isinstance(entries, list) or not entries:
        remedy = f"Give a list with an entry for each concurrency, such as {_EXAMPLE}."
        raise UserError("--times", file, remedy)
    found = [_entry(f"{file}[{index}]", entry) for index, entry in enumerate(entries)]
    numbers = [one.concurrency for one in found]
    for number in numbers:
        if numbers.count(number) > 1:
            raise UserError("concurrency", number, f"{file} has it twice; give each concurrency once.")
    return sorted(found, key=lambda one: one.concurrency)


def _entry(where: str, entry: Any) -> StepTimes:
    if not isinstance(entry, dict):
        raise UserError(where, entry, f"Give a mapping, such as {_EXAMPLE}.")
    for name in sorted(map(str, entry)):
        if name not in _KEYS:
            raise UserError(f"{where}.{name}", entry.get(name), f"There is no such key; use {_EXAMPLE}.")
    concurrency = entry.get("concurrency")
    if type(concurrency) is not int or concurrency < 1:
        raise UserError(f"{where}.concurrency", concurrency, "Give a whole number of sequences, at least 1.")
    target, draft = (_milliseconds(f"{where}.{name}", entry.get(name)) for name in ("target_ms", "draft_ms"))
    overhead = _milliseconds(f"{where}.overhead_ms", entry.get("overhead_ms", 0), at_least=0)
    given = entry.get("verify_ms")
    if not isinstance(given, dict) or not given:
        remedy = "Give the milliseconds by draft length, such as {4: 22.5, 8: 24.1}."
        raise UserError(f"{where}.verify_ms", given, remedy)
    verify = {0: target}
    for k, value in given.items():
        if isinstance(k, str) and k.isdigit():  # JSON has no numbers as keys
            k = int(k)
        if type(k) is not int or k < 1:
            remedy = "The keys are draft lengths: whole numbers, at least 1."
            raise UserError(f"{where}.verify_ms", k, remedy)
        verify[k] = _milliseconds(f"{where}.verify_ms.{k}", value)
    longest = max(verify)
    if longest < 2:
        remedy = "Give the time for a draft length of at least 2; shorter ones are interpolated."
        raise UserError(f"{where}.verify_ms", given, remedy)
    lengths = sorted(verify)
    steps: dict[int, Milliseconds] = {
        k: (float(np.interp(k, lengths, [verify[one] for one in lengths])) + k * draft + overhead,)
        for k in {1, *lengths[1:]}
    }
    return StepTimes(concurrency, (target,), steps, {k: (k * draft,) for k in steps})


def _milliseconds(where: str, value: Any, at_least: float | None = None) -> float:
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not number or (value <= 0 if at_least is None else value < at_least):
        remedy = f"Give milliseconds: a number {'above 0' if at_least is None else 'of at least 0'}."
        raise UserError(where, value, remedy)
    return float(value)
