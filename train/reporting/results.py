"""Reads evaluation results: which decoding runs were made, and a table of them."""

from typing import Any

from train.tables import aligned


def decoding_runs(evaluation: dict[str, Any]) -> list[tuple[str, float, dict[str, Any]]]:
    """(drafter, temperature, statistics) of every decoding run that was made."""
    runs = [("trained", "greedy"), ("trained", "sampling"), ("untrained", "untrained")]
    return [
        (drafter, evaluation[key].get("temperature", 0.0), evaluation[key])
        for drafter, key in runs
        if evaluation.get(key)
    ]


def in_vllm(evaluation: dict[str, Any]) -> bool:
    """Whether the numbers are from the engine that serves."""
    return evaluation["engine"].startswith("vLLM")


def identical_completions(stats: dict[str, Any]) -> str:
    """How many texts were, token for token, what the target writes alone."""
    num_completions = stats["num_identical"] + stats["num_near_tie"] + stats["num_different"]
    parts = [f"{stats['num_identical']} of {num_completions} identical"]
    if stats["num_near_tie"]:
        parts.append(f"{stats['num_near_tie']} part at a near-tie")
    if stats["num_different"]:
        parts.append(f"{stats['num_different']} differ")
    return ", ".join(parts)


def format_evaluation(result: dict[str, Any]) -> str:
    """A small table, what was assumed, and the engine."""
    head = ("k", "temperature", "acceptance length", "accepted at positions 1 to k", "drafts", "speed-up")
    rows = [
        (
            str(stats["k"]),
            f"{temperature:g}",
            f"{stats['acceptance_length']:.2f}",
            ", ".join(f"{100 * share:.0f} %" for share in stats["absolute_acceptance"]),
            f"{stats['num_drafts']:,}",
            f"{stats['speedup']:.2f}x",
        )
        for _, temperature, stats in decoding_runs(result)
    ]
    lines = aligned([head, *rows], text_columns=len(head))
    lines += [
        f"aux layer ids: {result['aux_layer_ids']}",
        f"prompts: {result['num_prompts']}, up to {result['max_new_tokens']} new tokens each",
        f"greedy text against the target alone: {identical_completions(result['greedy'])}",
        f"engine: {result['engine']}",
        *(f"note: {note}" for note in result["notes"]),
    ]
    return "\n".join(lines)
