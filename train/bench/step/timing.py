"""Times all sides on the same rows in turns, and summarizes the rounds."""

import statistics
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle31.cost.flops import StepCounts, count_step, gemm_sizes, step_flops
from train.bench.step.documents import packed_rows
from train.bench.step.inputs import write_inputs
from train.bench.step.shapes import Shape
from train.bench.step.sides import OURS, SideFailure, SideProcess, SideSpec


@dataclass(frozen=True)
class Settings:
    """The settings that all sides share."""

    rounds: int
    num_rows: int  # number of different rows; the rounds repeat them in order
    threads: int
    dtype: str
    device: str
    log_directory: Path


def time_shape(
    shape: Shape, peers: Sequence[SideSpec], conversations: Path | None, settings: Settings
) -> dict[str, Any]:
    """Time all sides on one shape; in each round every side runs one row.

    Every other round runs the sides in reverse order, so that no side always runs first. A peer that fails,
    for example because it runs out of memory, has an `error` instead of numbers.

    Raises:
        SideFailure: eagle31's side failed.
    """
    rows, source = packed_rows(shape, min(settings.rounds, settings.num_rows), conversations)
    num_rows = len(rows)
    with tempfile.TemporaryDirectory(prefix="eagle31-step-") as scratch, ExitStack() as running:
        data = Path(scratch) / "inputs.safetensors"
        batches = write_inputs(data, shape, rows, settings.dtype)
        counts = [count_step(batch, shape.num_steps) for batch in batches]
        num_tokens = [int((batch.document_ids >= 0).sum()) for batch in batches]
        results: dict[SideSpec, dict[str, Any]] = {}
        alive: dict[SideSpec, SideProcess] = {}
        for side in (*OURS, *peers):
            # The sides start and measure memory one after the other, so that none disturbs another.
            process = running.enter_context(_process(side, shape, data, num_rows, settings))
            results[side] = {"side": side.name, "head": side.head, "rounds": []}
            try:
                process.start()
                process.ask("round", row=0)
                results[side] |= process.about | {"memory": process.ask("memory", row=0)}
                alive[side] = process
            except SideFailure as failure:
                if side in OURS:
                    raise
                results[side]["error"] = str(failure)
        gemm: list[dict[str, Any]] = []
        for round_index in range(settings.rounds):
            row = round_index % num_rows
            sizes = gemm_sizes(shape.config(), counts[row])
            gemm.append(alive[OURS[0]].ask("gemm", sizes=sizes))
            for side in list(alive)[:: 1 if round_index % 2 == 0 else -1]:
                try:
                    timed = alive[side].ask("round", row=row)
                except SideFailure as failure:
                    if side in OURS:
                        raise
                    results[side]["error"] = str(failure)
                    del alive[side]
                    continue
                results[side]["rounds"].append({"row": row, "num_tokens": num_tokens[row], **timed})
    # With a GPU, CPU time does not measure the step.
    clock = "wall" if settings.device == "cuda" else "cpu"
    return {
        "shape": shape.to_json(),
        "content": source,
        "rows": [vars(one) | {"num_tokens": n} for one, n in zip(counts, num_tokens, strict=True)],
        "sides": [summarize_side(result, shape, counts, gemm, clock) for result in results.values()],
        "gemm": gemm,
    }


def summarize_side(
    result: dict[str, Any],
    shape: Shape,
    counts: Sequence[StepCounts],
    gemm: Sequence[dict[str, Any]],
    clock: str,
) -> dict[str, Any]:
    """Return medians over the rounds; for eagle31 also its FLOPs and the fraction of the peak rate.

    Args:
        clock: "cpu" or "wall"; times both the step and the peak rate.
    """
    rounds = result["rounds"]
    if not rounds:
        return result
    result = result | {
        "tokens_per_second": statistics.median(r["num_tokens"] / r["wall_seconds"] for r in rounds),
        "tokens_per_cpu_second": statistics.median(r["num_tokens"] / r["cpu_seconds"] for r in rounds),
        "wall_seconds_per_step": statistics.median(r["wall_seconds"] for r in rounds),
        "cpu_seconds_per_step": statistics.median(r["cpu_seconds"] for r in rounds),
    }
    if result["side"] == "eagle31":
        flops = [step_flops(shape.config(), one, result["head"] == "trained") for one in counts]
        per_round = [flops[r["row"]].total for r in rounds]
        result["flops"] = vars(flops[0]) | {"total": flops[0].total}
        peak = statistics.median(max(one[f"{clock}_flops"] for one in g["gemm"]) for g in gemm)
        rates = [count / r[f"{clock}_seconds"] for count, r in zip(per_round, rounds, strict=True)]
        result |= {"clock": clock, "peak_flops": peak, "fraction_of_peak": statistics.median(rates) / peak}
    return result


def like_for_like(measured: dict[str, Any]) -> list[dict[str, Any]]:
    """Compare eagle31 with each peer, both with the same head; return medians of ratios within rounds."""
    ours = {side["head"]: side for side in measured["sides"] if side["side"] == "eagle31"}
    compared = []
    for peer in measured["sides"]:
        our_side = ours[peer["head"]]
        if peer["side"] == "eagle31" or not peer["rounds"] or not our_side["rounds"]:
            continue
        pairs = list(zip(our_side["rounds"], peer["rounds"], strict=False))
        compared.append(
            {
                "peer": peer["side"],
                "head": peer["head"],
                "speed": statistics.median(b["wall_seconds"] / a["wall_seconds"] for a, b in pairs),
                "cpu_speed": statistics.median(b["cpu_seconds"] / a["cpu_seconds"] for a, b in pairs),
                "memory": our_side["memory"]["step_bytes"] / peer["memory"]["step_bytes"],
                "whole_memory": our_side["memory"]["peak_bytes"] / peer["memory"]["peak_bytes"],
            }
        )
    return compared


def peak_memory(shape: Shape, settings: Settings) -> dict[str, Any]:
    """Return the memory that eagle31's step with a trained head needs, measured in a new process."""
    rows, _ = packed_rows(shape, 1, None)
    side = OURS[0]
    with tempfile.TemporaryDirectory(prefix="eagle31-step-") as scratch:
        data = Path(scratch) / "inputs.safetensors"
        write_inputs(data, shape, rows, settings.dtype)
        with _process(side, shape, data, 1, settings) as process:
            process.start()
            # Weights and inputs are mapped files, which are resident once they have been read.
            process.ask("round", row=0)
            return process.ask("memory", row=0)


def _process(side: SideSpec, shape: Shape, data: Path, num_rows: int, settings: Settings) -> SideProcess:
    return SideProcess(
        side,
        shape,
        data,
        num_rows,
        threads=settings.threads,
        dtype=settings.dtype,
        device=settings.device,
        log_path=settings.log_directory / f"{shape.name}-{side.name}-{side.head}.log",
    )
