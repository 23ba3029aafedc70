"""Generating answers with transformers, in batches, in this process or in one for each device."""

import gc
import multiprocessing
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager
from multiprocessing.queues import SimpleQueue
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from data.conversations.workers import end_with_parent
from data.generation.answers import Turn
from data.sampling import Prompts, Sampling, mixed_seed
from data.target.architecture import attends_to_blocks
from data.target.loading import load_target
from data.target.spec import TargetSpec
from eagle31.errors import UserError

_model: PreTrainedModel | None = None  # of a process of `ProcessGenerator`


class TransformersGenerator:
    """An `AnswerGenerator` that runs the model in this process.

    A sampled answer depends on the group's other prompts of its turn, and on nothing else.
    """

    engine, num_groups = "hf", 1

    def __init__(self, model: PreTrainedModel, batch_size: int) -> None:
        self._model, self.group_size = model, batch_size

    def submit(self, group: Sequence[Turn], sampling: Sampling) -> Future[list[list[int]]]:
        """See `AnswerGenerator.submit`."""
        finished: Future[list[list[int]]] = Future()
        finished.set_result(generate_batch(self._model, *_batch(group, sampling)))
        return finished


class ProcessGenerator:
    """An `AnswerGenerator` that runs the model in one process for each device.

    Its batches and their seeds are those of `TransformersGenerator`, so the answers do not depend on the
    number of processes. Where a process dies, so does the run; answers that were handed over are kept.

    Args:
        devices: one for each process; may name a device several times.
    """

    engine = "hf"

    def __init__(self, spec: TargetSpec, devices: Sequence[torch.device], batch_size: int) -> None:
        self.group_size, self.num_groups = batch_size, 2 * len(devices)
        context = multiprocessing.get_context("spawn")
        queue = context.SimpleQueue()
        for device in devices:
            queue.put(str(device))
        self._pool = ProcessPoolExecutor(
            len(devices), mp_context=context, initializer=_load, initargs=(spec, queue)
        )

    def submit(self, group: Sequence[Turn], sampling: Sampling) -> Future[list[list[int]]]:
        """See `AnswerGenerator.submit`; BrokenProcessPool where a process has died."""
        return self._pool.submit(_generate, *_batch(group, sampling))

    def close(self) -> None:
        """End the processes."""
        self._pool.shutdown(cancel_futures=True)


def _load(spec: TargetSpec, devices: "SimpleQueue[str]") -> None:
    """Load the target on the next device, in a process of `ProcessGenerator`."""
    global _model
    end_with_parent()
    gc.enable()  # the command that starts this process pauses it for its imports, and is imported again here
    device = torch.device(devices.get())
    if device.type == "cuda":
        torch.cuda.set_device(device)  # kernels that name no device use the current one
    _model = load_target(spec, device)


def _generate(prompts: Prompts, sampling: Sampling, number: tuple[int, ...]) -> list[list[int]]:
    assert _model is not None
    return generate_batch(_model, prompts, sampling, number)


def _batch(group: Sequence[Turn], sampling: Sampling) -> tuple[Prompts, Sampling, tuple[int, ...]]:
    return [list(turn.prompt) for turn in group], sampling, group[0].seed


@contextmanager
def transformers_generator(
    spec: TargetSpec, device: torch.device, batch_size: int
) -> Iterator[TransformersGenerator | ProcessGenerator]:
    """Load the target with transformers, in a process for each GPU; its memory is free at the end.

    Args:
        device: where one process runs it: on a CPU, or if `spec.device_map` spreads the target.
    """
    num_gpus = torch.cuda.device_count() if device.type == "cuda" else 0
    if spec.device_map is not None or num_gpus <= 1:
        yield TransformersGenerator(load_target(spec, device), batch_size)
        return
    devices = [torch.device("cuda", index) for index in range(num_gpus)]
    with closing(ProcessGenerator(spec, devices, batch_size)) as generator:
        try:
            yield generator
        except BrokenProcessPool as error:
            remedy = (
                "A process that runs the target has died; its last output may say why. Run the same command "
                "again, which keeps finished answers, or lower data.regenerate.batch_size."
            )
            raise UserError("target.engine", "hf", remedy) from error


def generate_batch(
    model: PreTrainedModel, prompts: Prompts, sampling: Sampling, number: tuple[int, ...]
) -> list[list[int]]:
    """Return the answers to one batch.

    Args:
        number: what the seed of the batch is made of, next to that of the sampling settings.

    Raises:
        UserError: the batch exceeds the device's memory.
    """
    width = max(len(prompt) for prompt in prompts)
    if width > min(len(prompt) for prompt in prompts) and attends_to_blocks(model.config):
        alone = ([prompt] for prompt in prompts)  # padding would change the answers
        return [generate_batch(model, one, sampling, (*number, i))[0] for i, one in enumerate(alone)]
    config = generation_config(sampling)
    input_ids = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in prompts])
    attention_mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    generate: Any = model.generate  # its declared type is that of any module attribute, a tensor
    try:
        with _generation_defaults(model, config), _seeded((sampling.seed, *number), model.device):
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
    sampled = {
        "do_sample": True,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p or None,
        "repetition_penalty": sampling.repetition_penalty,
    }
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
        torch.manual_seed(mixed_seed(*seed))
        yield
