"""The engines that write the target's completions: transformers, or vLLM."""

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager

import torch

from data.generation.answers import AnswerGenerator
from data.generation.hf import TransformersGenerator
from data.generation.hf_processes import ProcessGenerator
from data.generation.vllm import VllmGenerator
from data.target.loading import load_target
from data.target.spec import TargetSpec
from data.vllm.endpoint import Endpoint, ExpectedTarget


@contextmanager
def transformers_generator(
    spec: TargetSpec, device: torch.device, batch_size: int, num_processes: int | None
) -> Iterator[AnswerGenerator]:
    """Load the target with transformers; its memory is free at the end.

    Args:
        device: where one process runs it.
        num_processes: None for one on each GPU of this node. A target that `spec.device_map` spreads is
            always run by one.
    """
    num_gpus = torch.cuda.device_count() if device.type == "cuda" else 0
    count = 1 if spec.device_map is not None else num_processes or num_gpus or 1
    if count == 1:
        yield TransformersGenerator(load_target(spec, device), batch_size)
        return
    devices = [torch.device("cuda", i % num_gpus) if num_gpus else device for i in range(count)]
    with closing(ProcessGenerator(spec, devices, batch_size)) as generator:
        yield generator


@contextmanager
def vllm_generator(
    endpoints: Sequence[Endpoint], expected: ExpectedTarget, patience_seconds: float
) -> Iterator[AnswerGenerator]:
    """Write with vLLM; an engine that it started is stopped at the end."""
    generator = VllmGenerator(endpoints, expected, patience_seconds)
    try:
        yield generator
    finally:
        generator.close()
