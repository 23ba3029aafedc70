"""Comparisons as lines for a terminal."""

from collections.abc import Sequence

from eagle31.decoding.acceptance import AcceptanceStats
from train.parity.compare import Comparison, Difference, count_completions
from train.parity.server import ServerComparison
from train.tables import aligned

_NUM_SHOWN = 8


def comparison_lines(comparison: Comparison) -> list[str]:
    """Return the counts of both sides, the differences and the verdict."""
    num_near, num_different = len(comparison.near_ties), len(comparison.differences)
    drafts = f"{comparison.num_equal} equal, {num_near} near-tie, {num_different} different"
    num = comparison.num_completions
    rows = [
        ["drafts compared", f"{comparison.num_compared}: {drafts}"],
        ["completions against vLLM without drafter", _completion_counts(comparison.plain_completions, num)],
        ["completions against the evaluator", _completion_counts(comparison.completions, num)],
    ]
    lines = [*_counts(comparison.ours, comparison.vllm), "", *aligned(rows, text_columns=2)]
    if comparison.exact:
        lines += _listed("drafts that differ", comparison.drafts)
        lines += _listed("completions that differ", [*comparison.plain_completions, *comparison.completions])
    lines += ["", _verdict(comparison.failures)]
    if not comparison.ours.num_accepted:
        lines.append("note: no drafted token was accepted, so this shows little; train the drafter first.")
    return lines


def server_lines(comparison: ServerComparison) -> list[str]:
    """Return the counts of both sides, the completions that differ and the verdict."""
    lines = [*_counts(comparison.ours, comparison.vllm), ""]
    counts = _completion_counts(comparison.completions, comparison.num_completions)
    lines.append(f"completions against the evaluator  {counts}")
    if comparison.exact:
        lines += _listed("completions that differ", comparison.completions)
    return [*lines, "", _verdict(comparison.failures)]


def _counts(ours: AcceptanceStats, vllm: AcceptanceStats) -> list[str]:
    sides = (ours, vllm)
    rows = [
        ["", "eagle31", "vLLM"],
        ["drafts", *(str(side.num_drafts) for side in sides)],
        ["acceptance length", *(f"{side.acceptance_length:.3f}" for side in sides)],
    ]
    for position in range(ours.k):
        rows.append(
            [
                f"accepted at position {position + 1}",
                *(str(side.accepted_per_position[position]) for side in sides),
            ]
        )
    return aligned(rows)


def _completion_counts(differences: Sequence[Difference], num_completions: int) -> str:
    counts = count_completions(differences, num_completions)
    return ", ".join(f"{counts[name]} {name}" for name in ("identical", "near-tie", "different"))


def _listed(title: str, differences: Sequence[Difference]) -> list[str]:
    """Return the first few differences; near-ties, which rounding explains, come last."""
    if not differences:
        return []
    ordered = sorted(differences, key=lambda one: one.near_tie)
    shown = [f"  {'near-tie' if one.near_tie else 'different'}: {one}" for one in ordered[:_NUM_SHOWN]]
    rest = len(ordered) - len(shown)
    return ["", f"{title}:", *shown, *([f"  and {rest} more (--json OUT writes all)"] if rest else [])]


def _verdict(failures: Sequence[str]) -> str:
    if not failures:
        return "verdict: vLLM serves what was trained"
    return f"verdict: vLLM does not serve what was trained: {'; '.join(failures)}"
