"""Output tokens per second per user, with and without the drafter."""

import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from train.parity.inputs import Inputs
from train.serving.engine import failure, run_worker
from train.tables import aligned

PLAIN, DRAFTER = "plain", "drafter"
# Both engines are loaded at once, so that they can take turns.
_SHARED_GPU_MEMORY = 0.45


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
    """The rates at one concurrency, in output tokens per second."""

    concurrency: int
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
    concurrency: Sequence[int],
    rounds: int,
    num_requests: int,
    one_at_a_time: bool,
    ignore_eos: bool,
) -> dict[str, Any]:
    """Run both engines in one process and return the worker's measurements.

    Raises:
        EngineFailure: an engine does not start or fails.
    """
    options = {"max_num_seqs": max(concurrency), "enforce_eager": inputs.device.type == "cpu"}
    shares_gpu = inputs.device.type == "cuda" and not one_at_a_time
    memory_given = "gpu_memory_utilization" in inputs.engine_arguments
    job = {
        "kind": "bench",
        "name": "both sides",
        "sides": [
            {"name": PLAIN, "engine": inputs.engine(drafter=False, **options).arguments()},
            {"name": DRAFTER, "engine": inputs.engine(drafter=True, **options).arguments()},
        ],
        "memory": {"gpu_memory_utilization": _SHARED_GPU_MEMORY} if shares_gpu and not memory_given else {},
        "one_at_a_time": one_at_a_time,
        "concurrency": list(concurrency),
        "rounds": rounds,
        "num_requests": num_requests,
        "max_tokens": inputs.max_new_tokens,
        "stop_token_ids": [] if ignore_eos else inputs.stop_token_ids,
        "prompts": inputs.prompts,
    }
    (result,) = run_worker([job], python, log)
    if "error" in result:
        raise failure("both sides", result["error"], result["traceback"], log)
    return result


def summarize(measurements: Sequence[dict[str, Any]]) -> list[SpeedRow]:
    """Return one row for each concurrency, in ascending order."""
    rows = []
    for concurrency in sorted({one["concurrency"] for one in measurements}):
        here = sorted(
            (one for one in measurements if one["concurrency"] == concurrency), key=lambda one: one["round"]
        )
        user = {side: [_user_rate(one) for one in here if one["side"] == side] for side in (PLAIN, DRAFTER)}
        total = {
            side: [one["num_tokens"] / one["seconds"] for one in here if one["side"] == side]
            for side in (PLAIN, DRAFTER)
        }
        ratios = [fast / slow for fast, slow in zip(user[DRAFTER], user[PLAIN], strict=True)]
        rows.append(
            SpeedRow(
                concurrency=concurrency,
                plain=Spread.of(user[PLAIN]),
                drafter=Spread.of(user[DRAFTER]),
                plain_total=Spread.of(total[PLAIN]),
                drafter_total=Spread.of(total[DRAFTER]),
                speedup=Spread.of(ratios),
            )
        )
    return rows


def report(inputs: Inputs, result: dict[str, Any], rounds: int, ignore_eos: bool) -> dict[str, Any]:
    """Return the content of serving.json: the rows and the conditions of the measurement."""
    counts = result["acceptance"]
    return {
        "engine": f"vLLM {result['vllm_version']}",
        "device": device_name(inputs.device),
        "dtype": inputs.dtype,
        "target": inputs.spec.model,
        "export": str(inputs.export.resolve()),
        "k": inputs.k,
        "temperature": 0,
        "ignore_eos": ignore_eos,
        "max_new_tokens": inputs.max_new_tokens,
        "num_prompts": len(inputs.prompts),
        "prompts": inputs.prompts_source,
        "rounds": rounds,
        "acceptance_length": 1 + counts["num_accepted"] / max(counts["num_drafts"], 1),
        "rows": [asdict(row) for row in summarize(result["measurements"])],
        "measurements": result["measurements"],
    }


def speed_lines(numbers: dict[str, Any]) -> list[str]:
    """Return the table and the conditions of the measurement."""
    rows = [["users", "plain", "with the drafter", "speed-up", "all users: plain", "with the drafter"]]
    for row in numbers["rows"]:
        spreads = {name: Spread(**value) for name, value in row.items() if name != "concurrency"}
        ratio = spreads["speedup"]
        rows.append(
            [
                str(row["concurrency"]),
                str(spreads["plain"]),
                str(spreads["drafter"]),
                f"{ratio.median:.2f}x ({ratio.lowest:.2f}-{ratio.highest:.2f})",
                f"{spreads['plain_total'].median:.1f}",
                f"{spreads['drafter_total'].median:.1f}",
            ]
        )
    length = f"{numbers['max_new_tokens']} tokens per completion"
    conditions = (
        f"{numbers['engine']}, {numbers['dtype']}, {numbers['device']}; k = {numbers['k']}, temperature 0, "
        f"{'' if numbers['ignore_eos'] else 'at most '}{length}, "
        f"acceptance length {numbers['acceptance_length']:.2f}"
    )
    return [
        f"Output tokens per second per user, median of {numbers['rounds']} rounds (lowest-highest)",
        "",
        *aligned(rows),
        "",
        conditions,
    ]


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} CPU, {os.cpu_count()} cores"


def _user_rate(measurement: dict[str, Any]) -> float:
    """Return the mean over requests of tokens per second, from sending to the last token."""
    return statistics.fmean(measurement["request_rates"])
