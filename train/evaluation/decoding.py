"""Evaluation: real speculative decoding with the exported weights, on prompts kept apart."""

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

NEAR_TIE = 1e-4  # between the two top logits: rounding decides below


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
    """What the target alone writes greedily: the yardstick of text and time."""
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
    """Greedy decoding with the drafter, its text held against the target's own."""
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
    verdicts = [completion_verdict(ours, own) for ours, own in zip(decoded, plain, strict=True)]
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
    """Rejection sampling, timed against the target sampling alone."""
    generator = torch.Generator(device).manual_seed(seed)
    limits: dict[str, Any] = {"max_new_tokens": max_new_tokens, "eos_token_ids": eos_token_ids}
    own: dict[str, Any] = {"temperature": temperature, "generator": generator}
    plain = decode_all(
        prompts, lambda p: decode_plainly(target, p, device=device, **limits, **own), "plain sampling"
    )
    decoded = decode_all(
        prompts,
        lambda p: decode_speculatively(
            target, drafter, frozen, p, draft_tokens=draft_tokens, **limits, **own
        ),
        "speculative sampling",
    )
    report = _report(decoded, draft_tokens)
    return report | {
        "temperature": temperature,
        "plain_seconds": sum(one.seconds for one in plain),
        "speedup": _rate(decoded) / _rate(plain),
    }


def completion_verdict(ours: Decoded, own: Decoded) -> str:
    """The verdict on a text that the target's own margins are known of."""
    pairs = zip(ours.token_ids, own.token_ids, strict=False)
    first = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    return verdict(ours.token_ids, own.token_ids, None if first is None else own.margins[first])


def verdict(ours: Sequence[int], own: Sequence[int], margin: float | None) -> str:
    """identical, near_tie (they part where the target's two best logits all but tie), different.

    Args:
        margin: between these two logits where the texts first part; None where one ends there.
    """
    if list(ours) == list(own):
        return "identical"
    return "near_tie" if margin is not None and margin < NEAR_TIE else "different"


def count_verdicts(verdicts: Sequence[str]) -> dict[str, int]:
    """How many texts had which."""
    return {f"num_{name}": verdicts.count(name) for name in ("identical", "near_tie", "different")}


def replay_by_length(
    drafter: Drafter, frozen: FrozenParts, store: HiddenStateStore, draft_tokens: int, device: torch.device
) -> dict[int, AcceptanceStats]:
    """Replay over a store of the target's own answers, by draft length 1..draft_tokens."""
    totals = {k: AcceptanceStats(k, 0, (0,) * k) for k in range(1, draft_tokens + 1)}
    for index in tracked(range(len(store)), "replay", "samples"):
        sample = store[index]
        batch = pack_row([sample], len(sample.input_ids)).to(device, frozen.embed_tokens.dtype)
        hits, counted = greedy_hits(drafter, frozen, batch, draft_tokens)
        for k in totals:
            totals[k] += replay(hits, counted, k)
    return totals


def decoding_numbers(
    stats: AcceptanceStats, *, num_tokens: int, num_target_forwards: int, seconds: float
) -> dict[str, Any]:
    """What `evaluation.json` says of every decoding run."""
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
    """Tokens per second."""
    return sum(len(one.token_ids) for one in decoded) / sum(one.seconds for one in decoded)
