"""Parity with vLLM: its drafts and completions, compared with the trained drafter and the target."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from data.capture.hf import open_capture
from data.progress import tracked
from data.target.parts import TargetParts
from data.target.spec import TargetSpec
from eagle31.decoding.acceptance import AcceptanceStats
from eagle31.export.read import LoadedExport
from train.evaluation.agreement import Agreement, Difference, compare_served, describe_counts
from train.evaluation.completing import CompletingTarget, packed
from train.evaluation.intervals import over_prompts
from train.evaluation.measure import candidate_of
from train.evaluation.replay import replay_greedily
from train.evaluation.serving import Served
from train.tables import aligned

_NUM_SHOWN = 8  # differences in a list
# The most near-ties, as a fraction of the drafts or tokens. In bfloat16, rounding decided 7 % of the drafts
# for SmolLM2, and 16 % after 30 steps of training. Layers or norms that are not those of training made 50 %
# or more near-ties, next to drafts that rounding does not explain.
NEAR_TIES = {torch.float32: 0.005, torch.bfloat16: 0.25, torch.float16: 0.25}
# For a quantized target, whose kernels differ between engines by more than rounding: the largest relative
# difference of the acceptance lengths, and of the drafts that are accepted up to each position.
TOLERANCE = 0.05


@dataclass(frozen=True)
class Comparison:
    """vLLM's drafts and completions, and where the reference has others."""

    k: int
    # Of each prompt: the trained drafter's statistics on vLLM's completion, and vLLM's.
    by_prompt: Sequence[tuple[AcceptanceStats, AcceptanceStats]]
    agreement: Agreement
    dtype: torch.dtype  # in which vLLM computes
    quantized: bool = False  # whether the target is: then only acceptance is judged

    @property
    def replayed(self) -> AcceptanceStats:
        return sum((ours for ours, _ in self.by_prompt), AcceptanceStats.from_lengths(self.k, []))

    @property
    def vllm(self) -> AcceptanceStats:
        return sum((theirs for _, theirs in self.by_prompt), AcceptanceStats.from_lengths(self.k, []))

    @property
    def failures(self) -> list[str]:
        """The reasons why vLLM does not serve what was trained; empty if it does."""
        agreement = self.agreement
        if not agreement.num_compared:
            return ["vLLM drafted nothing"]
        found = []
        if self.quantized:
            if not (self.vllm.num_drafts and self.replayed.num_drafts):
                return [f"no draft of {self.k} tokens is within a completion, so that nothing is judged"]
            gap = abs(self.vllm.acceptance_length / self.replayed.acceptance_length - 1)
            found = [f"acceptance lengths differ by {gap:.1%}"] if gap > TOLERANCE else []
            return found + self._positions_that_differ()
        for what, total, counts in (
            ("drafts", agreement.num_compared, agreement.counts_of_drafts),
            ("tokens of the completions", agreement.num_tokens, agreement.counts_of_tokens),
        ):
            allowed = max(1, int(NEAR_TIES[self.dtype] * total))
            if counts["num_different"]:
                found.append(f"{counts['num_different']} {what} differ")
            if counts["num_near_tie"] > allowed:
                found.append(f"{counts['num_near_tie']} {what} differ by near-ties; {allowed} may")
        return found

    def _positions_that_differ(self) -> list[str]:
        """Return up to which positions vLLM accepts another fraction of the drafts, beyond chance."""
        found = []
        for position in range(self.k):
            counts = [
                [count for one in sides for count in (one.accepted_per_position[position], one.num_drafts)]
                for sides in self.by_prompt
            ]
            ratio = over_prompts(lambda a0, n0, a1, n1: (a1 / n1) / (a0 / n0), *zip(*counts, strict=True))
            if ratio.low is None or ratio.high is None:
                continue
            if ratio.high < 1 - TOLERANCE or ratio.low > 1 + TOLERANCE:
                found.append(f"acceptance at position {position + 1} is {ratio.shown('x')} that of replay")
        return found

    @property
    def passed(self) -> bool:
        return not self.failures

    def to_json(self) -> dict[str, Any]:
        return {
            "passed": self.passed,
            "failures": self.failures,
            "replay": self.replayed.to_json(),
            "vllm": self.vllm.to_json(),
            "num_drafts": self.agreement.num_drafts,
            "drafts": self.agreement.counts_of_drafts,
            "tokens": self.agreement.counts_of_tokens,
            "differing": [
                {
                    "prompt": prompt,
                    **asdict(one),
                    "gap": one.gap if math.isfinite(one.gap) else None,
                    "near_tie": one.near_tie,
                }
                for prompt, one in [*self.agreement.drafts, *self.agreement.tokens]
            ],
        }


def compare_engine(
    loaded: LoadedExport,
    parts: TargetParts,
    spec: TargetSpec,
    prompts: Sequence[Sequence[int]],
    served: Served,
    k: int,
    dtype: torch.dtype,
) -> Comparison:
    """Compare every draft and every token of vLLM's greedy completions with the drafter and the target.

    Args:
        loaded: the trained drafter, on the device and in the dtype in which it computes.
        spec: of the target in transformers; on a CPU best in float32, whose rounding leaves only vLLM's.
        k: the number of tokens per draft.
        dtype: in which vLLM computes.
    """
    device = loaded.embed_tokens.device
    candidate = candidate_of(loaded, parts.head, device, loaded.embed_tokens.dtype)
    capture = open_capture(spec, parts, loaded.drafter.config.aux_layer_ids, device)
    target = CompletingTarget(capture, parts.fingerprint, batch_size=4)
    samples = target.samples(prompts, served.completions)
    captured = list(tracked(samples, "reference", "prompts", total=len(prompts)))
    ours = replay_greedily(*candidate, packed(sample for _, sample in captured), k).by_prompt
    theirs = served.acceptance(k)
    return Comparison(
        k=k,
        by_prompt=[
            (lengths[k - 1], theirs[index]) for lengths, (index, _) in zip(ours, captured, strict=True)
        ],
        agreement=compare_served(*candidate, captured, served, dtype),
        dtype=dtype,
        quantized=getattr(parts.config, "quantization_config", None) is not None,
    )


def comparison_lines(comparison: Comparison) -> list[str]:
    """Return the counts of both sides, the differences and the verdict."""
    rows = [
        ["drafts, compared with replay", describe_counts(comparison.agreement.counts_of_drafts)],
        ["tokens, compared with the target's", describe_counts(comparison.agreement.counts_of_tokens)],
    ]
    lines = [*_acceptance_rows(comparison), "", *aligned(rows, text_columns=2)]
    lines += _listed("drafts that differ", comparison.agreement.drafts)
    lines += _listed("tokens that differ", comparison.agreement.tokens)
    lines += ["", _verdict(comparison)]
    if not comparison.replayed.num_accepted:
        lines.append("note: no drafted token was accepted, so this shows little; train the drafter first.")
    return lines


def _acceptance_rows(comparison: Comparison) -> list[str]:
    sides = (comparison.replayed, comparison.vllm)
    rows = [
        ["on the same text", "trained", "vLLM"],
        ["drafts", *(str(side.num_drafts) for side in sides)],
        ["acceptance length", *(f"{side.acceptance_length:.3f}" for side in sides)],
    ]
    for position in range(comparison.k):
        accepted = (str(side.accepted_per_position[position]) for side in sides)
        rows.append([f"accepted at position {position + 1}", *accepted])
    return aligned(rows)


def _listed(title: str, listed: Sequence[tuple[int, Difference]]) -> list[str]:
    """Return the first few differences that rounding does not explain."""
    different = [(prompt, one) for prompt, one in listed if not one.near_tie]
    if not different:
        return []
    rest = len(different) - _NUM_SHOWN
    shown = [f"  prompt {prompt}, {one}" for prompt, one in different[:_NUM_SHOWN]]
    return ["", f"{title}:", *shown, *([f"  and {rest} more (--json OUT writes all)"] if rest > 0 else [])]


def _verdict(comparison: Comparison) -> str:
    if comparison.failures:
        return f"verdict: vLLM does not serve what was trained: {'; '.join(comparison.failures)}"
    if comparison.quantized:
        judged = (
            f"acceptance agrees within {TOLERANCE:.0%}, at each position too; for a quantized target, drafts "
            "are not judged"
        )
        return f"verdict: vLLM serves about what was trained ({judged})"
    name = str(comparison.dtype).removeprefix("torch.")
    allowed = (
        f"{NEAR_TIES[comparison.dtype]:.1%} may differ by what rounding in {name} explains, and no other"
    )
    return f"verdict: vLLM serves what was trained ({allowed})"
