"""What a run logs of the steps between two records: sums over supervised rows, times and memory."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch

from data.batches.device_rows import RowCounts
from data.batches.loader import SourceStats
from eagle31.training.step import DepthSums
from train.distributed import World, gathered, sum_over_ranks

LOGGED_METRICS = ("agreement", "expected_acceptance")  # computed at logging steps only


@dataclass(frozen=True)
class Speed:
    """What the speed of a step and its memory are compared with; None where it is not known."""

    peak_flops: float | None = None  # of one device, FLOP/s
    planned_bytes: int | None = None  # the plan's figure for one device; None on the CPU


class StepTimes:
    """The seconds of each step, including its wait for data.

    On a GPU the device takes the times, because the host is ahead of it by an unknown part of a step.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._marks: list[tuple[Any, Any]] = []
        self._begun: Any = None

    def begin(self) -> None:
        """Marks the beginning of a step, before its data is there."""
        self._begun = self._mark()

    def end(self) -> None:
        """Marks the end of the step, once all its work is queued."""
        self._marks.append((self._begun, self._mark()))

    def seconds(self) -> list[float]:
        """Return the seconds of each step. Waits for the last one."""
        if not self._on_gpu:
            return [end - begun for begun, end in self._marks]
        if self._marks:
            self._marks[-1][1].synchronize()
        return [begun.elapsed_time(end) / 1000 for begun, end in self._marks]

    def _mark(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


class WindowSums:
    """Sums since the last logged step; they are divided once, after the all-reduce."""

    def __init__(self, num_depths: int, device: torch.device) -> None:
        self.sums = torch.zeros(len(fields(DepthSums)), num_depths, dtype=torch.float64, device=device)
        self.metric_rows = self.sums.new_zeros(num_depths)
        self.num_depths = 0  # that were rolled out
        self.started = time.perf_counter()
        self.num_tokens = 0  # without padding
        self.flops = 0
        self.waited_seconds = 0.0
        self.steps = StepTimes(device)
        self.seconds_of = {"validation": 0.0, "diagnosis": 0.0, "checkpoint": 0.0}

    def add(self, sums: DepthSums, with_metrics: bool) -> None:
        """Adds one micro-batch; `with_metrics` says whether its sums include `LOGGED_METRICS`."""
        depth = len(sums.num_rows)
        self.num_depths = max(self.num_depths, depth)
        self.sums[:, :depth] += sums.stacked()
        if with_metrics:
            self.metric_rows[:depth] += sums.num_rows

    def count(self, counts: RowCounts) -> None:
        """Adds what a step's rows have."""
        self.num_tokens += counts.num_tokens
        self.flops += counts.flops

    @contextmanager
    def timed(self, what: str) -> Iterator[None]:
        """Adds the seconds that the "validation", "diagnosis" or "checkpoint" in the context takes."""
        started = time.perf_counter()
        yield
        self.seconds_of[what] += time.perf_counter() - started

    def metrics(self, world: World, speed: Speed = Speed()) -> dict[str, Any]:
        """Return the metrics of the window over all ranks. Every rank calls."""
        num_rows, *totals, weighted_loss = sum_over_ranks(self.sums.clone())
        metric_rows = sum_over_ranks(self.metric_rows.clone())
        names = [f.name for f in fields(DepthSums)][1:-1]
        counts = [metric_rows if name in LOGGED_METRICS else num_rows for name in names]
        means = [(total / rows.clamp(min=1)).tolist() for total, rows in zip(totals, counts, strict=True)]
        depth = [
            dict(zip(names, values, strict=True)) | {"num_rows": round(rows)}
            for rows, *values in zip(num_rows.tolist(), *means, strict=True)
        ]
        supervised = round(float(num_rows[0]))
        return {
            "loss": float(weighted_loss.sum()) / max(float(num_rows[0]), 1.0),
            "depth": depth[: self.num_depths],
            "supervised_positions": supervised,
            **self._speed(world, supervised, speed),
        }

    def _speed(self, world: World, supervised: int, speed: Speed) -> dict[str, float]:
        """Return rates over the window's whole time, and times and memory of the slowest or largest rank.

        What has no meaning on this device is absent.
        """
        step_seconds = self.steps.seconds()
        median, near_longest = np.quantile(step_seconds or [0.0], (0.5, 0.95), method="inverted_cdf")
        local = {
            "num_tokens": self.num_tokens,
            "flops": self.flops,
            "waited": self.waited_seconds,
            "in_steps": sum(step_seconds),
            "step_seconds_p50": median,
            "step_seconds_p95": near_longest,
            **{f"{what}_seconds": seconds for what, seconds in self.seconds_of.items()},
            "peak_bytes": peak_bytes(world.device),
        }
        of_ranks = dict(zip(local, np.transpose(gathered([*local.values()], world)), strict=True))
        slowest = int(of_ranks["waited"].argmax())
        seconds = time.perf_counter() - self.started
        found = {
            # Without padding; validation and checkpoints are in the time.
            "tokens_per_second": float(of_ranks["num_tokens"].sum()) / seconds,
            "supervised_positions_per_second": supervised / seconds,
            "num_ranks": world.size,
            "seconds": seconds,
            # From the rank that waited longest, because the others wait for it.
            "data_wait_seconds": float(of_ranks["waited"][slowest]),
            "data_wait_fraction": float(
                of_ranks["waited"][slowest] / max(of_ranks["in_steps"][slowest], 1e-9)
            ),
        }
        names = ["step_seconds_p50", "step_seconds_p95", *(f"{what}_seconds" for what in self.seconds_of)]
        found |= {name: float(of_ranks[name].max()) for name in names}
        if speed.peak_flops is not None and step_seconds:
            available = speed.peak_flops * world.size * float(of_ranks["in_steps"].max())
            found["model_flops_utilization"] = float(of_ranks["flops"].sum()) / available
        if speed.planned_bytes is not None:
            found["peak_memory_gb"] = float(of_ranks["peak_bytes"].max()) / 1e9
            found["planned_memory_gb"] = speed.planned_bytes / 1e9
        return found


def peak_bytes(device: torch.device) -> int:
    """Return the most bytes of tensors that the device held at once so far; 0 on the CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


def source_metrics(stats: SourceStats, world: World) -> dict[str, float]:
    """Return how the states of online capture arrived, over all ranks. Every rank calls."""
    local = [stats.waiting_bytes, stats.starved_seconds, stats.full_seconds, stats.num_restarts]
    waiting, starved, full, restarts = np.transpose(gathered(local, world))
    return {
        "spool_gb": float(waiting.sum()) / 1e9,
        "starved_seconds": float(starved.max()),
        "spool_full_seconds": float(full.max()),
        "producer_restarts": int(restarts.sum()),
    }
