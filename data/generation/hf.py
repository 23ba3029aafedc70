"""Generating answers with transformers, in batches."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig, PreTrainedModel

from data.sampling import Prompts, Sampling
from eagle31.errors import UserError


class TransformersGenerator:
    """An `AnswerGenerator` that runs the model in this process.

    A sampled answer depends on the other prompts of its batch.
    """

    engine = "hf"

    def __init__(self, model: PreTrainedModel, batch_size: int) -> None:
        self._model = model
        self._batch_size = batch_size

    def generate(
        self,
        prompts: Prompts,
        indices: Sequence[int],
        sampling: Sampling,
        on_answers: Callable[[Mapping[int, list[int]]], None],
    ) -> dict[int, str]:
        """Answer the prompts with the given indices; see `AnswerGenerator.generate`."""
        config, unfinished = generation_config(sampling), set(indices)
        for batch in batches_by_length(prompts, self._batch_size):
            if unfinished.isdisjoint(batch):
                continue
            # Finished prompts of the batch are generated again, because the others' answers depend on them.
            seed = (sampling.seed, batch[0])
            answers = generate_batch(self._model, [prompts[i] for i in batch], config, seed)
            on_answers({i: ids for i, ids in zip(batch, answers, strict=True) if i in unfinished})
        return {}


def generate_batch(
    model: PreTrainedModel, prompts: Prompts, config: GenerationConfig, seed: Sequence[int]
) -> list[list[int]]:
    """Return the answers to one batch.

    Raises:
        UserError: the batch exceeds the device's memory.
    """
    width = max(len(prompt) for prompt in prompts)
    input_ids = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in prompts])
    attention_mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    generate: Any = model.generate  # its declared type is that of any module attribute, a tensor
    try:
        with _generation_defaults(model, config), _seeded(seed, model.device):
            output = generate(
                input_ids.to(model.device),
                attention_mask=attention_mask.to(model.device),
                generation_config=config,
            )
    except torch.OutOfMemoryError as error:
        remedy = (
            f"A batch of prompts of up to {width:,} tokens exceeds the memory of {model.device}; lower it."
        )
        raise UserError("data.regenerate.batch_size", len(prompts), remedy) from error
    return [_cut(row[width:].tolist(), config.eos_token_id or []) for row in output]


def generation_config(sampling: Sampling) -> GenerationConfig:
    """Return the sampling settings as transformers takes them."""
    # The default of transformers is top_k=50.
    sampled = {"do_sample": True, "temperature": sampling.temperature}
    sampled |= {"top_k": sampling.top_k, "top_p": sampling.top_p}
    stop_token_ids = list(sampling.stop_token_ids)
    return GenerationConfig(
        max_new_tokens=sampling.max_new_tokens,
        eos_token_id=stop_token_ids or None,
        pad_token_id=stop_token_ids[0] if stop_token_ids else 0,
        **(sampled if sampling.temperature else {}),
    )


def _cut(tokens: list[int], stop_token_ids: Sequence[int]) -> list[int]:
    """Return the tokens up to and including the first stop token."""
    end = next((i + 1 for i, token in enumerate(tokens) if token in stop_token_ids), len(tokens))
    return tokens[:end]


@contextmanager
def _generation_defaults(model: PreTrainedModel, config: GenerationConfig) -> Iterator[None]:
    """Replace the model's generation config, from which `generate` takes all values that are not set."""
    previous, model.generation_config = model.generation_config, config
    try:
        yield
    finally:
        model.generation_config = previous


@contextmanager
def _seeded(seed: Sequence[int], device: torch.device) -> Iterator[None]:
    """Seed the global random generator, from which `generate` draws, and restore it afterwards."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(int(np.random.SeedSequence(seed).generate_state(1)[0]))
        yield


def batches_by_length(prompts: Prompts, batch_size: int) -> Iterator[list[int]]:
    """Yield batches of indices, longest prompts first: a batch that does not fit in memory fails early."""
    by_length = sorted(range(len(prompts)), key=lambda i: -len(prompts[i]))
    for start in range(0, len(by_length), batch_size):
        yield by_length[start : start + batch_size]
