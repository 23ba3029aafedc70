"""Output tokens per second per user in vLLM, with the drafter and without, by draft length."""

import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from train.evaluation.intervals import Floats, over_prompts
from train.evaluation.serving import failure, run_worker
from train.evaluation.serving_inputs import Inputs

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
) -> dict[str, Any]:
    """Run an engine for each draft length and one without the drafter; return what serving.json holds.

    Raises:
        EngineFailure: an engine does not start or fails.
    """
    options = {"max_num_seqs": None, "enforce_eager": inputs.device.type == "cpu"}
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
        "stop_token_ids": inputs.stop_token_ids,
        "prompts": inputs.prompts,
    }
    (result,) = run_worker([job], python, log)
    if "error" in result:
        raise failure("speed", result, log)
    return {
        "engine": f"vLLM {result['vllm_version']}",
        "device": device_name(inputs.device),
        "dtype": inputs.spec.dtype,
        "target": inputs.spec.model,
        "export": str(inputs.export.resolve()),
        "temperature": 0,
        "max_new_tokens": inputs.max_new_tokens,
        "num_prompts": len(inputs.prompts),
        "prompts": inputs.prompts_source,
        "rounds": rounds,
        "rows": speed_rows(result["measurements"]),
        "measurements": result["measurements"],
    }


def speed_rows(measurements: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one row for each concurrency and draft length, in ascending order.

    `plain` and `drafter` are rates: the tokens of all answers, divided by the seconds that users wait for
    them. `speedup` is the quotient of both, with an interval over prompts.
    """
    num_prompts = 1 + max(max(one["prompts"]) for one in measurements)
    sides: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for one in measurements:
        sides.setdefault((one["concurrency"], one["k"]), []).append(one)

    def by_prompt(side: Sequence[dict[str, Any]], name: str) -> Floats:
        summed = np.zeros(num_prompts)
        for one in side:
            np.add.at(summed, one["prompts"], one[name])
        return summed

    rows = []
    for concurrency, k in sorted(sides):
        if k == PLAIN:
            continue
        drafter, plain = sides[concurrency, k], sides[concurrency, PLAIN]
        counts = [by_prompt(side, name) for side in (drafter, plain) for name in ("num_tokens", "seconds")]
        fast_tokens, fast_seconds, tokens, seconds = (float(one.sum()) for one in counts)
        num_decoded, num_forwards = (
            sum(one[name] for one in drafter) for name in ("num_decoded", "num_forwards")
        )
        rows.append(
            {
                "concurrency": concurrency,
                "k": k,
                "plain": tokens / seconds,
                "drafter": fast_tokens / fast_seconds,
                "speedup": asdict(over_prompts(lambda n1, s1, n0, s0: (n1 / s1) / (n0 / s0), *counts)),
                "acceptance_length": num_decoded / max(num_forwards, 1),
            }
        )
    return rows


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} CPU, {os.cpu_count()} cores"
