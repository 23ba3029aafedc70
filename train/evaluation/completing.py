"""What the target writes, and its states of it."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from data.batches.rows import pack_row
from data.capture.hf import HiddenStateCapture
from data.generation.answers import answer_prompts
from data.generation.hf import TransformersGenerator
from data.samples import CapturedSample
from data.sampling import Sampling
from eagle31.training.batch import PackedBatch

_ROW_TOKENS = 2048


@dataclass(frozen=True)
class CompletingTarget:
    """A target in transformers that completes prompts in batches and returns its states of them."""

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
    ) -> Iterator[tuple[int, CapturedSample]]:
        """Yield the index of each prompt, and a sample of it with its completion, on the CPU."""
        for start in range(0, len(prompts), self.batch_size):
            batch = range(len(prompts))[start : start + self.batch_size]
            ids = [torch.tensor([*prompts[index], *completions[index]]) for index in batch]
            states = self.capture.capture(ids)
            for index, input_ids, (aux, final) in zip(batch, ids, states, strict=True):
                loss_mask = torch.arange(len(input_ids)) >= len(prompts[index])
                yield index, CapturedSample(input_ids, loss_mask, aux.cpu(), final.cpu())


def packed(samples: Iterable[CapturedSample]) -> Iterator[PackedBatch]:
    """Yield the samples in order, as many in a row as fit."""
    row: list[CapturedSample] = []
    num_tokens = 0
    for sample in samples:
        if row and num_tokens + len(sample.input_ids) > _ROW_TOKENS:
            yield pack_row(row, num_tokens)
            row, num_tokens = [], 0
        row.append(sample)
        num_tokens += len(sample.input_ids)
    if row:
        yield pack_row(row, num_tokens)
