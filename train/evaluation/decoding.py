"""Greedy decoding of some test prompts with the drafter, in eagle31 or in vLLM."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from data.progress import tracked
from eagle31.decoding.speculative import CachedTarget, Decoded, decode_speculatively
from eagle31.json_files import read_json, write_json
from eagle31.model.drafter import Drafter
from eagle31.model.frozen import FrozenParts
from train.engines.serving import Served, acceptance, placed_drafts


class PassResults:
    """A directory with one JSON file for each finished pass, which a later evaluation reads."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def run(self, name: str, compute: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return the result of a pass: the one on disk, or else the computed one, once it is on disk."""
        path = self.directory / f"{name}.json"
        if not path.exists():
            write_json(path, compute())
        return read_json(path)


@dataclass(frozen=True)
class DecodedSubset:
    """What an engine decoded with the drafter: some of the test prompts."""

    engine: str
    indices: Sequence[int]  # of the prompts
    served: Served
    sampling: dict[str, Any] | None  # `sampling` of evaluation.json
    dtype: torch.dtype  # in which the target computes


def decode_prompts(
    target: CachedTarget,
    drafter: Drafter,
    frozen: FrozenParts,
    prompts: Sequence[Sequence[int]],
    *,
    draft_tokens: int,
    max_new_tokens: int,
    eos_token_ids: Sequence[int],
    passes: PassResults,
) -> Served:
    """Complete the prompts with eagle31's decoder. Each completion is on disk once it is finished."""
    decoded = []
    for index, prompt in enumerate(tracked(prompts, "decoding", "prompts")):

        def complete(prompt: Sequence[int] = prompt) -> dict[str, Any]:
            limits: dict[str, Any] = {"max_new_tokens": max_new_tokens, "eos_token_ids": eos_token_ids}
            found = decode_speculatively(target, drafter, frozen, prompt, draft_tokens=draft_tokens, **limits)
            return asdict(found)

        decoded.append(Decoded(**passes.run(f"prompt-{index}", complete)))
    return Served([one.token_ids for one in decoded], [placed_drafts(one) for one in decoded])


def decoding_report(served: Served, draft_tokens: int) -> dict[str, Any]:
    """Return `decoding` of evaluation.json, without what `agreement_report` has."""
    return {
        "num_prompts": len(served.completions),
        **acceptance(draft_tokens, served.drafts, served.completions).to_json(),
        "num_tokens": sum(map(len, served.completions)),
    }


def engine_name(dtype: torch.dtype, device: torch.device) -> str:
    """Return eagle31's decoder as it is named next to its numbers."""
    return f"eagle31 (transformers, {str(dtype).removeprefix('torch.')}, {device.type})"
