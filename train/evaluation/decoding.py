"""Greedy decoding with the drafter and without it, in turns: texts, acceptance, and the speed-up."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from data.progress import tracked
from eagle31.decoding.speculative import (
    CachedTarget,
    Decoded,
    decode_plainly,
    decode_speculatively,
)
from eagle31.json_files import read_json, write_json
from eagle31.model.drafter import Drafter
from eagle31.model.frozen import FrozenParts
from train.engines.serving import acceptance, placed_drafts
from train.evaluation.agreement import DraftedCompletion
from train.evaluation.intervals import Resamples, median_interval

MIN_PROMPTS = 5  # the median of fewer says little
# The upper bound of the interval may be this many times the lower one. A wider interval does not tell a
# speed-up from a slow-down, or a good drafter from a poor one.
MAX_SPREAD = 1.5
WARM_UP_TOKENS = 8  # several drafts
IN_TURNS = "prompt by prompt in one process, the two sides in turns"

# Completes a prompt with at most this many tokens.
Decode = Callable[[Sequence[int], int], Decoded]


class PassResults:
    """A directory with one JSON file for each finished pass, which a later evaluation reads."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def has(self, name: str) -> bool:
        return self._path(name).exists()

    def run(self, name: str, compute: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return the result of a pass: the one on disk, or else the computed one, once it is on disk."""
        path = self._path(name)
        if not path.exists():
            write_json(path, compute())
        return read_json(path)

    def _path(self, name: str) -> Path:
        return self.directory / f"{name}.json"


@dataclass(frozen=True)
class DecodedSubset:
    """What an engine decoded: some of the test prompts."""

    engine: str
    report: dict[str, Any]  # `decoding` of evaluation.json, without `agreement_report`
    sampling: dict[str, Any] | None  # `sampling` of evaluation.json
    indices: Sequence[int]  # of the prompts
    completions: Sequence[DraftedCompletion]
    dtype: torch.dtype  # in which the target computes


@dataclass(frozen=True)
class DecodedPair:
    """One prompt, decoded with the drafter and without it."""

    plain: Decoded
    drafted: Decoded

    @property
    def completion(self) -> DraftedCompletion:
        return DraftedCompletion(
            self.drafted.token_ids, placed_drafts(self.drafted), alone=self.plain.token_ids
        )


def greedy_sides(
    target: CachedTarget,
    drafter: Drafter,
    frozen: FrozenParts,
    *,
    draft_tokens: int,
    eos_token_ids: Sequence[int],
) -> tuple[Decode, Decode]:
    """Return greedy decoding without the drafter, and with it."""
    device = frozen.embed_tokens.device

    def plain(prompt: Sequence[int], max_new_tokens: int) -> Decoded:
        limits: dict[str, Any] = {"max_new_tokens": max_new_tokens, "eos_token_ids": eos_token_ids}
        return decode_plainly(target, prompt, device=device, **limits)

    def drafted(prompt: Sequence[int], max_new_tokens: int) -> Decoded:
        limits: dict[str, Any] = {"max_new_tokens": max_new_tokens, "eos_token_ids": eos_token_ids}
        return decode_speculatively(target, drafter, frozen, prompt, draft_tokens=draft_tokens, **limits)

    return plain, drafted


def decode_in_turns(
    prompts: Sequence[Sequence[int]], plain: Decode, drafted: Decode, max_new_tokens: int, passes: PassResults
) -> list[DecodedPair]:
    """Decode each prompt on both sides, one right after the other, so that both have the same conditions.

    Every second prompt begins with the drafter. Before the first prompt both sides decode a few tokens, so
    that no time includes first calls. Each pair is on disk once it is finished.
    """
    names = [f"prompt-{index}" for index in range(len(prompts))]
    kept = sum(map(passes.has, names))
    if kept:
        print(f"evaluate: {kept} of {len(names)} prompts are decoded already", flush=True)
    if prompts and kept < len(names):
        for decode in (plain, drafted):
            decode(prompts[0], WARM_UP_TOKENS)
    pairs = []
    with fastest_threads(plain, prompts[0]) if kept < len(names) else nullcontext():
        for index, prompt in enumerate(tracked(prompts, "decoding", "prompts")):

            def both(prompt: Sequence[int] = prompt, index: int = index) -> dict[str, Any]:
                sides = [("plain", plain), ("drafted", drafted)]
                turns = sides if index % 2 == 0 else reversed(sides)
                return {name: asdict(decode(prompt, max_new_tokens)) for name, decode in turns}

            found = passes.run(names[index], both)
            pairs.append(DecodedPair(Decoded(**found["plain"]), Decoded(**found["drafted"])))
    return pairs


@contextmanager
def fastest_threads(plain: Decode, prompt: Sequence[int]) -> Iterator[None]:
    """Have both sides use as many threads as make the target alone fastest: one, or as many as before.

    The products of a small model are so short that threads wait for each other longer than they compute.
    """
    before = torch.get_num_threads()
    if before == 1:
        yield
        return
    seconds = {}
    for threads in (before, 1):
        torch.set_num_threads(threads)
        seconds[threads] = min(plain(prompt, WARM_UP_TOKENS).seconds for _ in range(2))
    torch.set_num_threads(min(seconds, key=lambda threads: seconds[threads]))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def decoding_report(pairs: Sequence[DecodedPair], draft_tokens: int) -> dict[str, Any]:
    """Return acceptance and the time."""
    drafted = [pair.drafted for pair in pairs]
    completions = [one.token_ids for one in drafted]
    timed = [
        TimedPrompt(
            len(pair.drafted.token_ids),
            pair.drafted.seconds,
            len(pair.plain.token_ids),
            pair.plain.seconds,
        )
        for pair in pairs
    ]
    return {
        "num_prompts": len(pairs),
        **acceptance(draft_tokens, map(placed_drafts, drafted), completions).to_json(),
        "num_tokens": sum(map(len, completions)),
        "timing": paired_timing(timed, IN_TURNS),
    }


def engine_name(dtype: torch.dtype, device: torch.device) -> str:
    """Return eagle31's decoder as it is named next to its numbers."""
    return f"eagle31 (transformers, {str(dtype).removeprefix('torch.')}, {device.type})"


@dataclass(frozen=True)
class TimedPrompt:
    """One prompt, decoded with the drafter and without it."""

    num_tokens: int
    seconds: float
    plain_num_tokens: int
    plain_seconds: float

    @property
    def ratio(self) -> float:
        """The tokens per second with the drafter, divided by those without it."""
        return (self.num_tokens / self.seconds) / (self.plain_num_tokens / self.plain_seconds)


def paired_timing(prompts: Sequence[TimedPrompt], how: str) -> dict[str, Any]:
    """Return both rates and the median of the prompts' ratios with its 95 % interval over prompts.

    Where these do not give the speed-up, it is None, and `unknown` has the reason.

    Args:
        how: says how the two sides were paired.
    """
    found = median_interval([one.ratio for one in prompts], Resamples(len(prompts)))
    unknown = None
    if len(prompts) < MIN_PROMPTS:
        unknown = f"{len(prompts)} prompts were timed, and at least {MIN_PROMPTS} are needed"
    elif found.high > MAX_SPREAD * found.low:
        unknown = f"the times vary too much (95 % interval {found.low:.2f} to {found.high:.2f})"
    return {
        "how": how,
        "num_prompts": len(prompts),
        "tokens_per_second": sum(one.num_tokens for one in prompts) / sum(one.seconds for one in prompts),
        "plain_tokens_per_second": sum(one.plain_num_tokens for one in prompts)
        / sum(one.plain_seconds for one in prompts),
        "speedup": None if unknown else found.value,
        "low": found.low,
        "high": found.high,
        "unknown": unknown,
        "ratios": [one.ratio for one in prompts],
    }
