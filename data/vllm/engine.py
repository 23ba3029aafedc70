"""An engine of the run's own: `worker.py` in vLLM's environment, started again when it dies."""

import asyncio
import contextlib
import json
from pathlib import Path
from typing import Any

from data.sampling import Sampling
from data.vllm.arguments import CaptureEngine
from data.vllm.endpoint import Refused, Unavailable, check_finished, connector_answer, sampling_fields
from data.vllm.environment import capture_environment, find_python
from eagle31.errors import UserError

_WORKER = Path(__file__).parent / "plugin" / "worker.py"
# One after the other, with no prompt answered in between; one that was never ready is not tried again.
_MAX_IDLE_DEATHS = 3
_CONCURRENCY = 256
_TAIL_LINES = 20
_CLOSE_SECONDS = 120.0  # what was captured is written
_LINE_BYTES = 1 << 26


class LocalEngine:
    """Ends with this process, however it ends.

    Args:
        log_path: takes all that vLLM prints.
        concurrency: prompts under way; vLLM's scheduler chooses among them.
    """

    name = "vLLM"

    def __init__(self, arguments: dict[str, Any], log_path: Path, concurrency: int = _CONCURRENCY) -> None:
        self.concurrency = concurrency
        self.log_path = log_path
        self.num_starts = 0
        self._arguments = arguments
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self._starting = asyncio.Lock()
        self._number = 0
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._idle_deaths = 0
        self._was_ready = False

    @staticmethod
    def of(engine: CaptureEngine, log_path: Path, concurrency: int = _CONCURRENCY) -> "LocalEngine":
        return LocalEngine(engine.arguments(), log_path, concurrency)

    @property
    def process_id(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def send(self, input_ids: list[int], params: dict[str, Any]) -> dict[str, Any]:
        sampling = {"max_tokens": 1, "temperature": 0.0}
        answer = await self._ask({"input_ids": input_ids, "params": params, "sampling": sampling})
        return connector_answer({"eagle31": answer["answer"]})

    async def generate(self, input_ids: list[int], sampling: Sampling) -> list[int]:
        message = {"input_ids": input_ids, "params": {}, "sampling": sampling_fields(sampling)}
        answer = await self._ask(message)
        check_finished(answer["finish_reason"])
        return answer["output_ids"]

    async def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        """One line to the worker, which is started where there is none, and its answer."""
        async with self._starting:
            if self._process is None or self._process.returncode is not None or self._reader_is_done():
                await self._start()
        process = self._process
        assert process is not None
        assert process.stdin is not None
        self._number += 1
        number = self._number
        future = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            process.stdin.write(json.dumps({"number": number, **message}).encode() + b"\n")
            await process.stdin.drain()
        except (BrokenPipeError, ConnectionResetError):
            pass  # the reader says so to all that wait
        if self._reader_is_done() and not future.done():
            self._waiting.pop(number, None)
            raise Unavailable("vLLM's process ended.", lost=True)
        answer = await future
        self._idle_deaths = 0
        if "refused" in answer:
            raise Refused(answer["refused"])
        return answer

    async def close(self) -> None:
        """Returns when what was captured is written, or the process killed."""
        process = self._process
        if process is None:
            return
        assert process.stdin is not None
        process.stdin.close()
        try:
            await asyncio.wait_for(process.wait(), _CLOSE_SECONDS)
        except asyncio.TimeoutError:
            process.kill()
            await process.wait()
        if self._reader is not None:
            await self._reader

    def _reader_is_done(self) -> bool:
        return self._reader is None or self._reader.done()

    async def _start(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
        python = find_python()
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with self.log_path.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                str(python),
                str(_WORKER),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env=capture_environment(python),
                limit=_LINE_BYTES,
                # Signals to the run's process group are for the run to answer.
                start_new_session=True,
            )
        self.num_starts += 1
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(self._arguments).encode() + b"\n")
        # Its first line says that it is ready.
        if not await self._process.stdout.readline():
            await self._process.wait()
            raise self._death()
        self._was_ready = True
        self._reader = asyncio.create_task(self._read(self._process))

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        while line := await process.stdout.readline():
            if not line.endswith(b"\n"):
                break  # it died in the middle
            answer = json.loads(line)
            future = self._waiting.pop(answer["number"], None)
            if future is not None and not future.done():
                future.set_result(answer)
        await process.wait()
        waiting, self._waiting = self._waiting, {}
        if not waiting:
            return
        error = self._death()
        for future in waiting.values():
            if not future.done():
                future.set_exception(error)

    def _death(self) -> Exception:
        """Unavailable while it is worth another start."""
        assert self._process is not None
        self._idle_deaths += 1
        attempts = _MAX_IDLE_DEATHS if self._was_ready else 1
        status = self._process.returncode
        how = f"signal {-status}" if status is not None and status < 0 else f"status {status}"
        if self._idle_deaths < attempts:
            return Unavailable(f"vLLM ended with {how}.", lost=True)
        text = self.log_path.read_text(encoding="utf-8", errors="replace").splitlines()[-_TAIL_LINES:]
        when = f"{attempts} times in a row without an answer" if self._was_ready else "before it was ready"
        remedy = f"vLLM ended with {how}, {when}:"
        told = "\n".join([remedy, *(f"  | {line}" for line in text), f"The whole log: {self.log_path}"])
        return UserError("vllm", self._arguments.get("model"), told)
