"""The speed and memory of training, from its metrics."""

import statistics
from collections.abc import Sequence
from typing import Any


def training_speed(metrics: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
    """Return names and values of what the metrics say, medians over the records of training.

    Args:
        metrics: the lines of metrics.jsonl. What a run did not log is left out.
    """
    train = [record for record in metrics if record["kind"] == "train"]

    def values(name: str) -> list[float]:
        return [record[name] for record in train if name in record]

    found = []
    if rates := values("supervised_positions_per_second"):
        tokens = statistics.median(values("tokens_per_second"))
        supervised = statistics.median(rates)
        counts = f"{tokens:,.0f} tokens and {supervised:,.0f} supervised positions per second"
        found.append(("training speed", f"{counts}, without padding"))
    if median := values("step_seconds_p50"):
        slow = max(values("step_seconds_p95"))
        found.append(
            ("step time", f"{statistics.median(median):.3g} s, 95th percentile at most {slow:.3g} s")
        )
    if used := values("model_flops_utilization"):
        found.append(("model FLOPs utilization", f"{statistics.median(used):.0%} of the peak bf16 rate"))
    if peaks := values("peak_memory_gb"):
        planned = values("planned_memory_gb")[-1]
        found.append(("peak GPU memory", f"{max(peaks):.1f} GB; the plan's figure is {planned:.1f} GB"))
    validations = [r["seconds"] for r in metrics if r["kind"] == "validation" and "seconds" in r]
    if checkpoints := values("checkpoint_seconds"):
        rest = f"validation {sum(validations):.1f} s, checkpoints {sum(checkpoints):.1f} s"
        found.append(("time outside steps", rest))
    return found
