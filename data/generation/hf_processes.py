"""Generating answers with transformers in several processes, one for each device."""

import os
import queue
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict

import torch

from data.generation.hf import batches_by_length
from data.processes.child import Message
from data.processes.parent import ChildProcess, module_command, without_launcher
from data.sampling import Prompts, Sampling
from data.target.spec import TargetSpec
from eagle31.errors import UserError

_WORKER = "data.generation.hf_worker"
_MAX_DEATHS = 2  # of processes on the same batch
_CLOSE_SECONDS = 10.0


class ProcessGenerator:
    """An `AnswerGenerator` that runs the model in one process for each device.

    The batches and their seeds are those of `TransformersGenerator`, so the answers do not depend on the
    number of processes. The batch of a process that dies goes to another one. A process is started again if
    it has answered a batch before it died.

    Args:
        devices: one for each process; may name a device several times.
    """

    engine = "hf"

    def __init__(self, spec: TargetSpec, devices: Sequence[torch.device], batch_size: int) -> None:
        self._spec = spec
        self._devices = devices
        self._batch_size = batch_size
        self._workers: list[_Worker] = []
        self._events: queue.SimpleQueue[tuple[_Worker, Message | None]] = queue.SimpleQueue()

    @property
    def process_ids(self) -> list[int]:
        return [worker.process.process_id for worker in self._workers]

    def generate(
        self,
        prompts: Prompts,
        indices: Sequence[int],
        sampling: Sampling,
        on_answers: Callable[[Mapping[int, list[int]]], None],
    ) -> dict[int, str]:
        """Answer the prompts with the given indices; see `AnswerGenerator.generate`.

        Raises:
            UserError: two processes died on the same batch, or none is left.
        """
        unfinished, deaths = set(indices), Counter[int]()
        batches = {
            batch[0]: batch
            for batch in batches_by_length(prompts, self._batch_size)
            if not unfinished.isdisjoint(batch)
        }
        pending = deque(batches)
        for device in self._devices[len(self._workers) : len(batches)]:
            self._workers.append(_Worker(self._spec, device, self._events))
        while True:
            for worker in self._workers:
                if worker.number is None and pending:
                    number = pending.popleft()
                    texts = [list(prompts[i]) for i in batches[number]]
                    worker.request(number, texts, (sampling.seed, number), sampling)
            if not any(worker.number is not None for worker in self._workers):
                return {}
            worker, answer = self._events.get()
            if answer is not None:
                batch = batches[worker.note_answer(answer)]
                answers = zip(batch, answer["answers"], strict=True)
                on_answers({i: ids for i, ids in answers if i in unfinished})
                continue
            lost = worker.number
            if lost is not None:
                pending.appendleft(lost)
                deaths[lost] += 1
            self._replace(worker, at_once=lost is not None and deaths[lost] >= _MAX_DEATHS)

    def close(self) -> None:
        """End the processes."""
        for worker in self._workers:
            worker.process.close(_CLOSE_SECONDS)

    def _replace(self, dead: "_Worker", at_once: bool) -> None:
        """Start a process again that has worked; raise UserError where that is of no use."""
        dead.process.join()
        self._workers.remove(dead)
        if dead.process.failure is not None:
            raise UserError(*dead.process.failure)
        if dead.num_answers and not at_once:
            self._workers.append(_Worker(self._spec, dead.device, self._events))
        elif at_once or not self._workers:
            remedy = (
                f"The process that runs the target on {dead.device} ended with "
                f"{dead.process.exit_description}. Its last output: "
                f"{' | '.join(dead.process.log_tail()) or 'nothing'}"
            )
            raise UserError("target.engine", "hf", remedy)


class _Worker:
    """One process and the batch that it is at."""

    def __init__(
        self,
        spec: TargetSpec,
        device: torch.device,
        events: "queue.SimpleQueue[tuple[_Worker, Message | None]]",
    ) -> None:
        self.device = device
        self.number: int | None = None  # of the batch, its first prompt
        self.num_answers = 0
        self.process = ChildProcess(
            module_command(_WORKER),
            {"target": asdict(spec), "device": str(device)},
            environment=without_launcher(os.environ),
            answered=lambda answer: events.put((self, answer)),
            ended=lambda: events.put((self, None)),
        )

    def request(
        self, number: int, prompts: list[list[int]], seed: tuple[int, int], sampling: Sampling
    ) -> None:
        self.number = number
        self.process.send({"number": number, "prompts": prompts, "seed": seed, "sampling": asdict(sampling)})

    def note_answer(self, answer: Message) -> int:
        """Note that the batch is answered, and return its number."""
        assert answer["number"] == self.number
        self.number, self.num_answers = None, self.num_answers + 1
        return answer["number"]
