"""The engines that write the target's completions: transformers, or vLLM."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from data.generation.answers import AnswerGenerator
from data.generation.hf import TransformersGenerator
from data.generation.vllm import VllmGenerator
from data.target.loading import load_target
from data.target.spec import TargetSpec
from data.vllm.endpoint import Endpoint, ExpectedTarget


@contextmanager
def transformers_generator(
    spec: TargetSpec, device: torch.device, batch_size: int
) -> Iterator[AnswerGenerator]:
    """Load the target with transformers; its memory is free at the end."""
    yield TransformersGenerator(load_target(spec, device), batch_size)


@contextmanager
def vllm_generator(endpoints: Sequence[Endpoint], expected: ExpectedTarget) -> Iterator[AnswerGenerator]:
    """Write with vLLM; an engine that it started is stopped at the end."""
    generator = VllmGenerator(endpoints, expected)
    try:
        yield generator
    finally:
        generator.close()
