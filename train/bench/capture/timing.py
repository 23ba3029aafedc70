"""Times capture and plain prefill of the same tokens in turns, and summarizes the rounds."""

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datasets import Dataset
from numpy.typing import NDArray

from data.capture.tokens import dataset_rows
from data.store.codec import CODECS, FINAL_STATES, Encoding, Rows, encoded_bytes
from data.target.spec import TargetSpec

PREFILL = "prefill"


@dataclass(frozen=True)
class Timing:
    """Time of one pass over all samples."""

    wall_seconds: float
    cpu_seconds: float  # of all processes of the side


@dataclass(frozen=True)
class Task:
    """The input of every side: the samples and how to capture them."""

    spec: TargetSpec
    aux_layer_ids: tuple[int, ...]
    dataset: Dataset  # columns input_ids and loss_mask
    encodings: tuple[Encoding, ...]
    batch_tokens: int
    shard_tokens: int
    scratch: Path  # an empty directory for stores

    @property
    def num_tokens(self) -> int:
        return int(dataset_rows(self.dataset, Encoding())[:, 0].sum())


# One side; it runs over all samples once.
RunSide = Callable[[], Timing]
# Opens a source for the time of its rounds: the side `PREFILL`, and a side per encoding, named by its codec.
OpenSource = Callable[[Task], AbstractContextManager[Mapping[str, RunSide]]]


def time_rounds(
    open_source: OpenSource, task: Task, rounds: int, note: Callable[[str], None]
) -> dict[str, list[Timing]]:
    """Return each side's timings; every other round runs in reverse order, so that drift favours no side."""
    timings: dict[str, list[Timing]] = {}
    with open_source(task) as sides:
        for name, run in sides.items():
            note(f"warming up {name}")
            run()
            timings[name] = []
        for number in range(rounds):
            for name in _turns(list(sides), number):
                timings[name].append(sides[name]())
                note(f"round {number + 1}: {name} {timings[name][-1].wall_seconds:.2f} s")
    return timings


def _turns(names: list[str], number: int) -> Iterator[str]:
    yield from names if number % 2 == 0 else reversed(names)


def summary(timings: Mapping[str, Sequence[Timing]], num_tokens: int) -> list[dict[str, Any]]:
    """Return medians over the rounds; ratios to plain prefill are taken within each round."""
    prefill = timings[PREFILL]
    return [
        {
            "side": name,
            "tokens_per_second": statistics.median(num_tokens / one.wall_seconds for one in rounds),
            "tokens_per_cpu_second": statistics.median(num_tokens / one.cpu_seconds for one in rounds),
            "of_prefill": _median_ratio(
                [one.wall_seconds for one in prefill], [one.wall_seconds for one in rounds]
            ),
            "of_prefill_cpu": _median_ratio(
                [one.cpu_seconds for one in prefill], [one.cpu_seconds for one in rounds]
            ),
            "rounds": [vars(one) for one in rounds],
        }
        for name, rounds in timings.items()
    ]


def _median_ratio(prefill: Sequence[float], side: Sequence[float]) -> float:
    return statistics.median(a / b for a, b in zip(prefill, side, strict=True))


def sizes(dataset: Dataset, num_aux_layers: int, hidden_size: int, dtype: Any) -> list[dict[str, Any]]:
    """Return the bytes per token of every encoding, and their ratio to bf16 with all states."""

    def num_bytes(encoding: Encoding) -> int:
        return encoded_bytes(encoding, rows[encoding.final_states], num_aux_layers, hidden_size, dtype)

    rows = {states: _total(dataset_rows(dataset, Encoding("bf16", states))) for states in FINAL_STATES}
    tokens, bf16_bytes = rows["all"].tokens, num_bytes(Encoding("bf16", "all"))
    return [
        {
            **encoding.to_json(),
            "bytes_per_token": num_bytes(encoding) / tokens,
            "of_bf16": num_bytes(encoding) / bf16_bytes,
        }
        for encoding in (Encoding(codec, states) for codec in CODECS for states in FINAL_STATES)
    ]


def _total(rows: NDArray) -> Rows:
    return Rows(*map(int, rows.sum(axis=0)))
