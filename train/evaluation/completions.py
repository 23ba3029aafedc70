"""The target's completions with their hidden states, from transformers in this process."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from data.capture.hf import HiddenStateCapture
from data.generation.answers import answer_prompts
from data.generation.hf import TransformersGenerator
from data.samples import CapturedSample
from data.sampling import Sampling


@dataclass(frozen=True)
class CompletingTarget:
    """A target that completes prompts in batches and returns its states of them."""

    capture: HiddenStateCapture
    fingerprint: str  # of its weights
    batch_size: int  # prompts in a forward pass

    def complete(self, prompts: Sequence[Sequence[int]], sampling: Sampling, output: Path) -> list[list[int]]:
        """Return the completions, which are kept in a JSONL file, `output`, so that they can be resumed."""
        return answer_prompts(
            TransformersGenerator(self.capture.model, self.batch_size),
            prompts,
            sampling,
            output=output,
            model_fingerprint=self.fingerprint,
            progress=True,
        )

    def samples(
        self, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]]
    ) -> Iterator[CapturedSample]:
        """Yield each prompt with its completion and the states of both, on the CPU.

        A completion of fewer than two tokens has no draft, and is left out.
        """
        pairs = [pair for pair in zip(prompts, completions, strict=True) if len(pair[1]) > 1]
        for start in range(0, len(pairs), self.batch_size):
            batch = pairs[start : start + self.batch_size]
            ids = [torch.tensor([*prompt, *completion]) for prompt, completion in batch]
            states = self.capture.capture(ids)
            for input_ids, (prompt, _), (aux, final) in zip(ids, batch, states, strict=True):
                loss_mask = torch.arange(len(input_ids)) >= len(prompt)
                yield CapturedSample(input_ids, loss_mask, aux.cpu(), final.cpu())
