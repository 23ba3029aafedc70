"""Evaluation by speculative decoding in transformers with the exported weights, and by replay."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from data.batches.loader import pack_row
from data.progress import tracked
from data.store import HiddenStateStore
from eagle31.decoding.acceptance import AcceptanceStats
from eagle31.decoding.replay import replay
from eagle31.decoding.speculative import (
    CachedTarget,
    Decoded,
    acceptance,
    decode_plainly,
    decode_speculatively,
)
from eagle31.model.drafter import Drafter
from eagle31.model.frozen import FrozenParts
from eagle31.training.step import greedy_hits


def decode_all(
    prompts: Sequence[Sequence[int]], decode: Callable[[Sequence[int]], Decoded], label: str
) -> list[Decoded]:
    """Decode each prompt and report the progress under `label`."""
    return [decode(prompt) for prompt in tracked(prompts, label, "prompts")]


def decode_without_drafter(
    target: CachedTarget,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    eos_token_ids: Sequence[int],
    device: torch.device,
) -> list[Decoded]:
    """Return the target's greedy completions without a drafter, to compare tokens and times with."""
    return decode_all(
        prompts,
        lambda prompt: decode_plainly(
            target, prompt, max_new_tokens=max_new_tokens, eos_token_ids=eos_token_ids, device=device
        ),
        "plain decoding",
    )


def greedy_report(
    target: CachedTarget,
    drafter: Drafter,
    frozen: FrozenParts,
    prompts: Sequence[Sequence[int]],
    plain: Sequence[Decoded],
    *,
    draft_tokens: int,
    max_new_tokens: int,
    eos_token_ids: Sequence[int],
    label: str,
) -> dict[str, Any]:
    """Decode greedily with the drafter and compare the completions with `plain`, the target's without it."""
    decoded = decode_all(
        prompts,
        lambda prompt: decode_speculatively(
            target,
            drafter,
            frozen,
            prompt,
            draft_tokens=draft_tokens,
            max_new_tokens=max_new_tokens,
            eos_token_ids=eos_token_ids,
        ),
        label,
    )
    verdicts = [completion_verdict(*pair) for pair in zip(decoded, plain, strict=True)]
    plain_seconds = sum(one.seconds for one in plain)
    report = _report(decoded, draft_tokens)
    report |= {"plain_seconds": plain_seconds, "speedup": _rate(decoded) / _rate(plain)}
    return report | count_verdicts(verdicts)


def sampling_report(
    target: CachedTarget,
    drafter: Drafter,
    frozen: FrozenParts,
    prompts: Sequence[Sequence[int]],
    *,
    draft_tokens: int,
    max_new_tokens: int,
    eos_token_ids: Sequence[int],
    temperature: float,
    seed: int,
    device: torch.device,
) -> dict[str, Any]:
    """Decode by rejection sampling with the drafter, and by sampling without it for the speed-up."""
    generator = torch.Generator(device).manual_seed(seed)
    limits: dict[str, Any] = {"max_new_tokens": max_new_tokens, "eos_token_ids": eos_token_ids}
    sampling: dict[str, Any] = {"temperature": temperature, "generator": generator}
    plain = decode_all(
        prompts, lambda p: decode_plainly(target, p, device=device, **limits, **sampling), "plain sampling"
    )
    decoded = decode_all(
        prompts,
        lambda p: decode_speculatively(
            target, drafter, frozen, p, draft_tokens=draft_tokens, **limits, **sampling
        ),
        "speculative sampling",
    )
    report = _report(decoded, draft_tokens)
    return report | {
        "temperature": temperature,
        "plain_seconds": sum(one.seconds for one in plain),
        "speedup": _rate(decoded) / _rate(plain),
    }


def completion_verdict(drafted: Decoded, plain: Decoded) -> str:
    """Return the `verdict` on a completion; the plain one holds the target's margins and their bounds."""
    pairs = zip(drafted.token_ids, plain.token_ids, strict=False)
    first = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    margin, bound = (None, 0.0) if first is None else (plain.margins[first], plain.bounds[first])
    return verdict(drafted.token_ids, plain.token_ids, margin, bound)


def verdict(drafted: Sequence[int], plain: Sequence[int], margin: float | None, bound: float) -> str:
    """Return "identical", "near_tie" or "different" for completions with and without the drafter.

    At a near-tie the target's two top logits are so close that rounding decides between them.

    Args:
        margin: the difference of these logits at the first different token; None where one completion ends.
        bound: the difference up to which rounding may decide, see `rounding_bound`.
    """
    if list(drafted) == list(plain):
        return "identical"
    return "near_tie" if margin is not None and margin <= bound else "different"


def count_verdicts(verdicts: Sequence[str]) -> dict[str, int]:
    """Return the number of completions with each verdict."""
    return {f"num_{name}": verdicts.count(name) for name in ("identical", "near_tie", "different")}


def replay_by_length(
    drafter: Drafter, frozen: FrozenParts, store: HiddenStateStore, draft_tokens: int, device: torch.device
) -> dict[int, AcceptanceStats]:
    """Return replay statistics over a store of the target's completions, by draft length 1..draft_tokens."""
    totals = {k: AcceptanceStats(k, 0, (0,) * k) for k in range(1, draft_tokens + 1)}
    for index in tracked(range(len(store)), "replay", "samples"):
        sample = store[index]
        batch = pack_row([sample], len(sample.input_ids)).to(device, frozen.embed_tokens.dtype)
        hits, supervised = greedy_hits(drafter, frozen, batch, draft_tokens)
        for k in totals:
            totals[k] += replay(hits, supervised, k)
    return totals


def decoding_numbers(
    stats: AcceptanceStats, *, num_tokens: int, num_target_forwards: int, seconds: float
) -> dict[str, Any]:
    """Return the entries of `evaluation.json` that every decoding run has."""
    return stats.to_json() | {
        "num_tokens": num_tokens,
        "num_target_forwards": num_target_forwards,
        "tokens_per_target_forward": num_tokens / num_target_forwards,
        "seconds": seconds,
    }


def _report(decoded: Sequence[Decoded], draft_tokens: int) -> dict[str, Any]:
    return decoding_numbers(
        acceptance(decoded, draft_tokens),
        num_tokens=sum(len(one.token_ids) for one in decoded),
        num_target_forwards=sum(one.num_target_forwards for one in decoded),
        seconds=sum(one.seconds for one in decoded),
    )


def _rate(decoded: Sequence[Decoded]) -> float:
    """Return tokens per second."""
    return sum(len(one.token_ids) for one in decoded) / sum(one.seconds for one in decoded)
