"""The target's answers through transformers, in batches."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig, PreTrainedModel

from data.sampling import Prompts, Sampling


class TransformersGenerator:
    """An `AnswerGenerator`; what is drawn for a prompt depends on the others of its batch."""

    engine = "hf"

    def __init__(self, model: PreTrainedModel, batch_size: int) -> None:
        self._model = model
        self._batch_size = batch_size

    def write(
        self,
        prompts: Prompts,
        missing: Sequence[int],
        sampling: Sampling,
        done: Callable[[Mapping[int, list[int]]], None],
    ) -> dict[int, str]:
        config, unfinished = _generation_config(sampling), set(missing)
        for batch in _batches_by_length(prompts, self._batch_size):
            if unfinished.isdisjoint(batch):
                continue
            # The whole batch again, for the others beside it.
            seed = (sampling.seed, batch[0])
            written = _generate(self._model, [prompts[i] for i in batch], config, seed)
            done({i: ids for i, ids in zip(batch, written, strict=True) if i in unfinished})
        return {}


def _generate(
    model: PreTrainedModel, prompts: Prompts, config: GenerationConfig, seed: Sequence[int]
) -> list[list[int]]:
    width = max(len(prompt) for prompt in prompts)
    input_ids = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in prompts])
    attention_mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    generate: Any = model.generate  # typed as a tensor, like any attribute of a module
    with _only(model, config), _seeded(seed, model.device):
        output = generate(
            input_ids.to(model.device),
            attention_mask=attention_mask.to(model.device),
            generation_config=config,
        )
    return [_cut(row[width:].tolist(), config.eos_token_id or []) for row in output]


def _generation_config(sampling: Sampling) -> GenerationConfig:
    # transformers takes top_k=50 where nothing is said.
    drawn = {"do_sample": True, "temperature": sampling.temperature, "top_k": 0, "top_p": 1.0}
    ends = list(sampling.stop_token_ids)
    return GenerationConfig(
        max_new_tokens=sampling.max_new_tokens,
        eos_token_id=ends or None,
        pad_token_id=ends[0] if ends else 0,
        **(drawn if sampling.temperature else {}),
    )


def _cut(tokens: list[int], stop_token_ids: Sequence[int]) -> list[int]:
    """Up to and with the first stop token."""
    end = next((i + 1 for i, token in enumerate(tokens) if token in stop_token_ids), len(tokens))
    return tokens[:end]


@contextmanager
def _only(model: PreTrainedModel, config: GenerationConfig) -> Iterator[None]:
    """Without this, `generate` fills what `config` leaves open from the model's generation_config.json."""
    own, model.generation_config = model.generation_config, config
    try:
        yield
    finally:
        model.generation_config = own


@contextmanager
def _seeded(seed: Sequence[int], device: torch.device) -> Iterator[None]:
    """`generate` draws from the global generator; it is put back afterwards."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(int(np.random.SeedSequence(seed).generate_state(1)[0]))
        yield


def _batches_by_length(prompts: Prompts, batch_size: int) -> Iterator[list[int]]:
    """Longest first, so that what does not fit into memory fails at once."""
    order = sorted(range(len(prompts)), key=lambda i: -len(prompts[i]))
    for start in range(0, len(order), batch_size):
        yield order[start : start + batch_size]
