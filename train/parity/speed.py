"""Output tokens per second per user, with the drafter and without, and the times of decoding steps."""

import os
import platform
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from eagle31.errors import UserError
from train.draft_length.step_times import StepTimes
from train.parity.inputs import Inputs
from train.reporting.results import SERVING_FORMAT
from train.serving.engine import failure, run_worker
from train.tables import aligned

WALL_TIME, CPU_TIME = "wall", "cpu"
PLAIN = 0  # the draft length of the engine without the drafter
# All engines are loaded at once, so that they can take turns.
_SHARED_GPU_MEMORY = 0.9


@dataclass(frozen=True)
class Spread:
    """Median and range over the rounds."""

    median: float
    lowest: float
    highest: float

    @staticmethod
    def of(values: Sequence[float]) -> "Spread":
        return Spread(statistics.median(values), min(values), max(values))

    def __str__(self) -> str:
        return f"{self.median:.1f} ({self.lowest:.1f}-{self.highest:.1f})"


@dataclass(frozen=True)
class SpeedRow:
    """The rates at one concurrency and draft length, in output tokens per second."""

    concurrency: int
    k: int
    plain: Spread  # per user
    drafter: Spread  # per user
    plain_total: Spread  # all users together
    drafter_total: Spread
    speedup: Spread  # ratio of the rates per user, taken in each round


def time_serving(
    inputs: Inputs,
    python: Path,
    log: Path,
    *,
    draft_lengths: Sequence[int],
    concurrency: Sequence[int],
    rounds: int,
    num_requests: int,
    one_at_a_time: bool,
    ignore_eos: bool,
    clock: str,
) -> dict[str, Any]:
    """Run an engine for each draft length and one without the drafter; return the worker's measurements.

    Raises:
        EngineFailure: an engine does not start or fails.
    """
    options = {"max_num_seqs": max(concurrency), "enforce_eager": inputs.device.type == "cpu"}
    shares_gpu = inputs.device.type == "cuda" and not one_at_a_time
    memory_given = "gpu_memory_utilization" in inputs.engine_arguments
    share = _SHARED_GPU_MEMORY / (1 + len(draft_lengths))
    sides = [{"k": PLAIN, "engine": inputs.engine(drafter=False, **options).arguments()}]
    for k in draft_lengths:
        sides.append({"k": k, "engine": replace(inputs.engine(drafter=True, **options), k=k).arguments()})
    job = {
        "kind": "bench",
        "name": "speed",
        "sides": sides,
        "memory": {"gpu_memory_utilization": share} if shares_gpu and not memory_given else {},
        "one_at_a_time": one_at_a_time,
        "concurrency": list(concurrency),
        "clock": clock,
        "rounds": rounds,
        "num_requests": num_requests,
        "max_tokens": inputs.max_new_tokens,
        "stop_token_ids": [] if ignore_eos else inputs.stop_token_ids,
        "prompts": inputs.prompts,
    }
    (result,) = run_worker([job], python, log)
    if "error" in result:
        raise failure("speed", result["error"], result["traceback"], log)
    return result


def summarize(measurements: Sequence[dict[str, Any]]) -> list[SpeedRow]:
    """Return one row for each concurrency and draft length, in ascending order."""
    rows = []
    for concurrency, here in _by_concurrency(measurements):
        plain = here.pop(PLAIN)
        for k, drafted in here.items():
            user, user_plain = ([_user_rate(one) for one in side] for side in (drafted, plain))
            total, total_plain = (
                [one["num_tokens"] / one["seconds"] for one in side] for side in (drafted, plain)
            )
            ratios = [fast / slow for fast, slow in zip(user, user_plain, strict=True)]
            rows.append(
                SpeedRow(
                    concurrency=concurrency,
                    k=k,
                    plain=Spread.of(user_plain),
                    drafter=Spread.of(user),
                    plain_total=Spread.of(total_plain),
                    drafter_total=Spread.of(total),
                    speedup=Spread.of(ratios),
                )
            )
    return rows


def step_times(measurements: Sequence[dict[str, Any]]) -> list[StepTimes]:
    """Return the times of decoding steps, for each concurrency at which all engines could be timed."""
    found = []
    for concurrency, here in _by_concurrency(measurements):
        if any(one["step_seconds"] is None for side in here.values() for one in side):
            continue  # the completions are too short for all users to decode at the same time
        steps = {k: tuple(1000 * one["step_seconds"] for one in side) for k, side in here.items()}
        drafting = {
            k: tuple(1000 * one["draft_seconds"] for one in side)
            for k, side in here.items()
            if all(one["draft_seconds"] is not None for one in side)
        }
        found.append(StepTimes(concurrency, steps.pop(PLAIN), steps, drafting))
    return found


def acceptance_lengths(measurements: Sequence[dict[str, Any]]) -> dict[int, float]:
    """Return the tokens per forward pass of the target by draft length."""
    forwards: Counter[int] = Counter()
    decoded: Counter[int] = Counter()
    for one in measurements:
        forwards[one["k"]] += one["num_forwards"]
        decoded[one["k"]] += one["num_decoded"]
    return {k: decoded[k] / max(forwards[k], 1) for k in sorted(forwards) if k != PLAIN}


def report(
    inputs: Inputs, result: dict[str, Any], rounds: int, ignore_eos: bool, clock: str
) -> dict[str, Any]:
    """Return the content of serving.json: the rows and the conditions of the measurement."""
    measurements = result["measurements"]
    rows, accepted = summarize(measurements), acceptance_lengths(measurements)
    return {
        "format": SERVING_FORMAT,
        "engine": f"vLLM {result['vllm_version']}",
        "device": device_name(inputs.device),
        "dtype": inputs.dtype,
        "clock": clock,
        "target": inputs.spec.model,
        "export": str(inputs.export.resolve()),
        "temperature": 0,
        "ignore_eos": ignore_eos,
        "max_new_tokens": inputs.max_new_tokens,
        "num_prompts": len(inputs.prompts),
        "prompts": inputs.prompts_source,
        "rounds": rounds,
        "rows": [asdict(row) | {"acceptance_length": accepted[row.k]} for row in rows],
        "measurements": measurements,
    }


def speed_lines(numbers: dict[str, Any]) -> list[str]:
    """Return the table and the conditions of the measurement."""
    head = ["users", "k", "plain", "with the drafter", "speed-up", "all users: plain", "with the drafter"]
    rows = [[*head, "acceptance length"]]
    for row in numbers["rows"]:
        names = ("plain", "drafter", "plain_total", "drafter_total", "speedup")
        spreads = {name: Spread(**row[name]) for name in names}
        ratio = spreads["speedup"]
        rows.append(
            [
                str(row["concurrency"]),
                str(row["k"]),
                str(spreads["plain"]),
                str(spreads["drafter"]),
                f"{ratio.median:.2f}x ({ratio.lowest:.2f}-{ratio.highest:.2f})",
                f"{spreads['plain_total'].median:.1f}",
                f"{spreads['drafter_total'].median:.1f}",
                f"{row['acceptance_length']:.2f}",
            ]
        )
    length = f"{numbers['max_new_tokens']} tokens per completion"
    conditions = (
        f"{measured_with(numbers)}; temperature 0, {'' if numbers['ignore_eos'] else 'at most '}{length}"
    )
    return [
        f"Output tokens per second per user, median of {numbers['rounds']} rounds (lowest-highest)",
        "",
        *aligned(rows),
        "",
        conditions,
    ]


def measured_with(numbers: dict[str, Any]) -> str:
    """Return the engine, the device and the clock."""
    clock = ", CPU time" if numbers["clock"] == CPU_TIME else ""
    return f"{numbers['engine']}, {numbers['dtype']}, {numbers['device']}{clock}"


def check_clock(clock: str, on_cpu: bool) -> None:
    """Raise UserError where CPU time would not be the time of a step."""
    if clock != CPU_TIME:
        return
    if not on_cpu:
        raise UserError("--clock", clock, "Leave it out: on a GPU only the time that passes says anything.")
    if not os.environ.get("VLLM_CPU_OMP_THREADS_BIND", "").isdigit():
        remedy = "The times of threads add up: give vLLM one core with VLLM_CPU_OMP_THREADS_BIND=0."
        raise UserError("--clock", clock, remedy)


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} CPU, {os.cpu_count()} cores"


def _user_rate(measurement: dict[str, Any]) -> float:
    """Return the mean over requests of tokens per second, from sending to the last token."""
    return statistics.fmean(measurement["request_rates"])


def _by_concurrency(
    measurements: Sequence[dict[str, Any]],
) -> Iterator[tuple[int, dict[int, list[dict[str, Any]]]]]:
    """Yield each concurrency with its measurements by draft length, in the order of the rounds."""
    ordered = sorted(measurements, key=lambda one: (one["concurrency"], one["k"], one["round"]))
    for concurrency, here in groupby(ordered, key=lambda one: one["concurrency"]):
        yield concurrency, {k: list(side) for k, side in groupby(here, key=lambda one: one["k"])}
