"""A local vLLM engine: `plugin/worker.py` in vLLM's environment, started again when it dies."""

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from data.processes.child import Message
from data.processes.parent import ChildProcess
from data.sampling import Sampling
from data.vllm.arguments import CaptureEngine
from data.vllm.endpoint import Refused, Unavailable, check_finished, connector_answer, sampling_fields
from data.vllm.environment import LOADER, capture_environment, find_python
from eagle31.errors import UserError

# Consecutive deaths without an answer between them. An engine that was never ready is not started again.
_MAX_IDLE_DEATHS = 3
_CONCURRENCY = 256
_LOG_LINES = 20
_CLOSE_SECONDS = 120.0  # for writing what was captured


class LocalEngine:
    """An `Endpoint` that ends with this process, however this process ends. Used within one event loop.

    Args:
        arguments: the arguments of `vllm.LLM`.
        log_path: the file that everything vLLM prints is appended to.
        concurrency: the number of prompts under way; vLLM's scheduler chooses among them.
    """

    name = "vLLM"

    def __init__(self, arguments: dict[str, Any], log_path: Path, concurrency: int = _CONCURRENCY) -> None:
        self.concurrency = concurrency
        self.log_path = log_path
        self.num_starts = 0
        self._arguments = arguments
        self._life: _Life | None = None
        self._starting = asyncio.Lock()
        self._number = 0
        self._idle_deaths = 0
        self._was_ready = False

    @staticmethod
    def of(engine: CaptureEngine, log_path: Path, concurrency: int = _CONCURRENCY) -> "LocalEngine":
        return LocalEngine(engine.arguments(), log_path, concurrency)

    @property
    def process_id(self) -> int | None:
        return None if self._life is None else self._life.process.process_id

    async def send(self, input_ids: list[int], params: dict[str, Any]) -> dict[str, Any]:
        sampling = {"max_tokens": 1, "temperature": 0.0}
        answer = await self._ask({"input_ids": input_ids, "params": params, "sampling": sampling})
        return connector_answer({"eagle31": answer["answer"]})

    async def generate(self, input_ids: list[int], sampling: Sampling) -> list[int]:
        message = {"input_ids": input_ids, "params": {}, "sampling": sampling_fields(sampling)}
        answer = await self._ask(message)
        check_finished(answer["finish_reason"])
        return answer["output_ids"]

    async def close(self) -> None:
        """Return once the engine has ended, after it has written what was captured."""
        if self._life is not None:
            await self._life.close()

    async def _ask(self, message: Message) -> Message:
        """Send one prompt to the engine, starting it where none is running, and wait for the answer."""
        async with self._starting:
            if self._life is None or self._life.ended.done() or not self._life.process.alive:
                await self._start()
        life = self._life
        assert life is not None
        self._number += 1
        answer = await life.ask({"number": self._number, **message})
        if answer is None:
            raise self._death(life)
        self._idle_deaths = 0
        if "refused" in answer:
            raise Refused(answer["refused"])
        return answer

    async def _start(self) -> None:
        if self._life is not None:
            await self._life.kill()
        self._life = _Life(self._arguments, self.log_path)
        self.num_starts += 1
        if not await self._life.is_ready():
            raise self._death(self._life)
        self._was_ready = True

    def _death(self, life: "_Life") -> Exception:
        """Return Unavailable while another start is worthwhile, and a UserError after that."""
        if not life.death_counted:
            life.death_counted = True
            self._idle_deaths += 1
        attempts = _MAX_IDLE_DEATHS if self._was_ready else 1
        how = life.process.exit_description
        if self._idle_deaths < attempts:
            return Unavailable(f"vLLM ended with {how}.", lost=True)
        when = f"{attempts} times in a row without an answer" if self._was_ready else "before it was ready"
        lines = [f"  | {line}" for line in life.process.log_tail(_LOG_LINES)]
        remedy = "\n".join([f"vLLM ended with {how}, {when}:", *lines, f"The full log: {self.log_path}"])
        return UserError("vllm", self._arguments.get("model"), remedy)


class _Life:
    """One process of the engine, and who waits for its answers."""

    def __init__(self, arguments: dict[str, Any], log_path: Path) -> None:
        loop = asyncio.get_running_loop()
        self.death_counted = False
        self.ended: asyncio.Future[None] = loop.create_future()
        self._ready: asyncio.Future[bool] = loop.create_future()
        self._waiting: dict[int, asyncio.Future[Message | None]] = {}

        def in_loop(callback: Callable[..., None], *arguments: Any) -> None:
            # After the loop has ended nobody waits.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(callback, *arguments)

        python = find_python()
        self.process = ChildProcess(
            [python, LOADER],
            arguments,
            environment=capture_environment(python),
            began=lambda: in_loop(self._note_ready),
            answered=lambda answer: in_loop(self._note_answer, answer),
            ended=lambda: in_loop(self._note_end),
            log=log_path,
        )

    async def is_ready(self) -> bool:
        """Wait until the engine is ready or has ended; return whether it is ready."""
        return await asyncio.shield(self._ready)

    async def ask(self, message: Message) -> Message | None:
        """Send a prompt and return its answer, or None where the process ends before."""
        if self.ended.done():
            return None
        future = self._waiting[message["number"]] = asyncio.get_running_loop().create_future()
        self.process.send(message)
        return await future

    async def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        await self.ended

    async def close(self) -> None:
        self.process.end_requests()
        try:
            await asyncio.wait_for(asyncio.shield(self.ended), _CLOSE_SECONDS)
        except asyncio.TimeoutError:
            await self.kill()

    def _note_ready(self) -> None:
        if not self._ready.done():
            self._ready.set_result(True)

    def _note_answer(self, answer: Message) -> None:
        future = self._waiting.pop(answer["number"], None)
        if future is not None and not future.done():
            future.set_result(answer)

    def _note_end(self) -> None:
        self.ended.set_result(None)
        if not self._ready.done():
            self._ready.set_result(False)
        waiting, self._waiting = self._waiting, {}
        for future in waiting.values():
            if not future.done():
                future.set_result(None)
