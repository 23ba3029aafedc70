"""Output tokens per second per user in vLLM, with the drafter and without, by draft length."""

import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from train.engines.serving import failure, run_worker
from train.evaluation.serving_inputs import Inputs
from train.tables import aligned

PLAIN = 0  # the draft length of the engine without the drafter
# All engines are loaded at once, so that they can take turns.
_SHARED_GPU_MEMORY = 0.9


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
) -> dict[str, Any]:
    """Run an engine for each draft length and one without the drafter; return what serving.json holds.

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
        "rounds": rounds,
        "num_requests": num_requests,
        "max_tokens": inputs.max_new_tokens,
        "stop_token_ids": [] if ignore_eos else inputs.stop_token_ids,
        "prompts": inputs.prompts,
    }
    (result,) = run_worker([job], python, log)
    if "error" in result:
        raise failure("speed", result["error"], result["traceback"], log)
    return {
        "engine": f"vLLM {result['vllm_version']}",
        "device": device_name(inputs.device),
        "dtype": inputs.dtype,
        "target": inputs.spec.model,
        "export": str(inputs.export.resolve()),
        "temperature": 0,
        "ignore_eos": ignore_eos,
        "max_new_tokens": inputs.max_new_tokens,
        "num_prompts": len(inputs.prompts),
        "prompts": inputs.prompts_source,
        "rounds": rounds,
        "rows": speed_rows(result["measurements"]),
        "measurements": result["measurements"],
    }


def speed_rows(measurements: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one row for each concurrency and draft length, in ascending order.

    `plain`, `drafter` and their ratio `speedup` have the median and the range over the rounds; the ratio is
    taken in each round.
    """
    sides: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for one in sorted(measurements, key=lambda one: (one["concurrency"], one["k"], one["round"])):
        sides.setdefault((one["concurrency"], one["k"]), []).append(one)
    rows = []
    for (concurrency, k), side in sides.items():
        if k == PLAIN:
            continue
        drafter, plain = (_user_rates(one) for one in (side, sides[concurrency, PLAIN]))
        num_decoded = sum(one["num_decoded"] for one in side)
        num_forwards = sum(one["num_forwards"] for one in side)
        rows.append(
            {
                "concurrency": concurrency,
                "k": k,
                "plain": _spread(plain),
                "drafter": _spread(drafter),
                "speedup": _spread([fast / slow for fast, slow in zip(drafter, plain, strict=True)]),
                "acceptance_length": num_decoded / max(num_forwards, 1),
            }
        )
    return rows


def speed_lines(numbers: dict[str, Any]) -> list[str]:
    """Return the table and the conditions of the measurement."""
    rows = [["users", "k", "plain", "with the drafter", "speed-up", "acceptance length"]]
    for row in numbers["rows"]:
        spread = "{median:.1f} ({lowest:.1f}-{highest:.1f})"
        rates = [spread.format(**row[side]) for side in ("plain", "drafter")]
        speedup = "{median:.2f}x ({lowest:.2f}-{highest:.2f})".format(**row["speedup"])
        accepted = f"{row['acceptance_length']:.2f}"
        rows.append([str(row["concurrency"]), str(row["k"]), *rates, speedup, accepted])
    length = f"{numbers['max_new_tokens']} tokens per completion"
    return [
        f"Output tokens per second per user, median of {numbers['rounds']} rounds (lowest-highest)",
        "",
        *aligned(rows),
        "",
        f"{numbers['engine']}, {numbers['dtype']}, {numbers['device']}; temperature 0, "
        f"{'' if numbers['ignore_eos'] else 'at most '}{length}",
    ]


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} CPU, {os.cpu_count()} cores"


def _user_rates(side: Sequence[dict[str, Any]]) -> list[float]:
    """Return for each round the mean over requests of tokens per second, from sending to the last token."""
    return [statistics.fmean(one["request_rates"]) for one in side]


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "lowest": min(values), "highest": max(values)}
