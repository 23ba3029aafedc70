"""A run's results: decoding runs, a table of them for `scripts/evaluate`, and the speed in vLLM."""

from pathlib import Path
from typing import Any

from eagle31.json_files import read_json
from train.tables import aligned


def decoding_runs(evaluation: dict[str, Any]) -> list[tuple[str, float, dict[str, Any]]]:
    """Return (drafter, temperature, statistics) of every decoding run in the results."""
    runs = [("trained", "greedy"), ("trained", "sampling"), ("untrained", "untrained")]
    return [
        (drafter, evaluation[key].get("temperature", 0.0), evaluation[key])
        for drafter, key in runs
        if evaluation.get(key)
    ]


def in_vllm(evaluation: dict[str, Any]) -> bool:
    """Return whether the results are from vLLM."""
    return evaluation["engine"].startswith("vLLM")


def identical_completions(stats: dict[str, Any]) -> str:
    """Return, in words, how many greedy completions equal the target's without the drafter."""
    num_completions = stats["num_identical"] + stats["num_near_tie"] + stats["num_different"]
    parts = [f"{stats['num_identical']} of {num_completions} identical"]
    if stats["num_near_tie"]:
        parts.append(f"{stats['num_near_tie']} near-tie")
    if stats["num_different"]:
        parts.append(f"{stats['num_different']} different")
    return ", ".join(parts)


def read_serving(output_dir: Path) -> dict[str, Any] | None:
    """Return the speed in vLLM from serving.json, or None if it is of another export than the run's."""
    path = output_dir / "report" / "serving.json"
    if not path.exists():
        return None
    numbers = read_json(path)
    return numbers if Path(numbers["export"]) == (output_dir / "export").resolve() else None


def format_evaluation(result: dict[str, Any]) -> str:
    """Return a table of the decoding runs, and their conditions."""
    head = ("k", "temperature", "acceptance length", "accepted at positions 1 to k", "drafts", "speed-up")
    rows = [
        (
            str(stats["k"]),
            f"{temperature:g}",
            f"{stats['acceptance_length']:.2f}",
            ", ".join(f"{100 * rate:.0f} %" for rate in stats["absolute_acceptance"]),
            f"{stats['num_drafts']:,}",
            f"{stats['speedup']:.2f}x",
        )
        for _, temperature, stats in decoding_runs(result)
    ]
    completions = identical_completions(result["greedy"])
    lines = aligned([head, *rows], text_columns=len(head))
    lines += [
        f"aux layer ids: {result['aux_layer_ids']}",
        f"prompts: {result['num_prompts']}, up to {result['max_new_tokens']} new tokens each",
        f"greedy completions compared with the target without drafter: {completions}",
        f"engine: {result['engine']}",
        *(f"note: {note}" for note in result["notes"]),
    ]
    return "\n".join(lines)
