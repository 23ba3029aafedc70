"""The sides of a step benchmark, and the processes that run them."""

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from train.bench.peers.environment import find_python, process_environment
from train.bench.step.shapes import Shape

HERE = Path(__file__).parent
_TAIL_LINES = 12


class SideFailure(RuntimeError):
    """A side's process failed; the message has the reason and the path of its log."""


@dataclass(frozen=True)
class SideSpec:
    """The project whose step runs, and whether it trains the draft head."""

    name: str
    head: Literal["trained", "frozen"]

    @property
    def label(self) -> str:
        return f"{self.name}, head {self.head}"


OURS = (SideSpec("eagle31", "trained"), SideSpec("eagle31", "frozen"))
# Each peer as it trains: speculators freezes the head that it copies from the target, SpecForge trains it.
PEER_SIDES = {
    "speculators": SideSpec("speculators", "frozen"),
    "specforge": SideSpec("specforge", "trained"),
}


class SideProcess:
    """A running `worker.py`; use it in a `with` block."""

    def __init__(
        self,
        side: SideSpec,
        shape: Shape,
        data: Path,
        num_rows: int,
        *,
        threads: int,
        dtype: str,
        device: str,
        log_path: Path,
    ) -> None:
        self.side = side
        self.log_path = log_path
        spec = {
            "side_file": str(HERE / f"side_{side.name}.py"),
            "head": side.head,
            "shape": shape.to_json(),
            "llama_config": shape.llama_config(),
            "data": str(data),
            "num_rows": num_rows,
            "threads": threads,
            "dtype": dtype,
            "device": device,
        }
        python = sys.executable if side.name == "eagle31" else str(find_python(side.name))
        log_path.parent.mkdir(parents=True, exist_ok=True)
        with log_path.open("wb") as log:
            self.process = subprocess.Popen(
                [python, "-I", str(HERE / "worker.py"), json.dumps(spec)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=process_environment(threads),
                cwd=log_path.parent,
            )
        self.about: dict[str, Any] = {}

    def __enter__(self) -> "SideProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()

    def start(self) -> None:
        """Wait until the side is built.

        Raises:
            SideFailure
        """
        self.about = self._answer()

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        """Send one request and return its response.

        Raises:
            SideFailure
        """
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # `_answer` raises with the reason
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            status = self.process.wait()
            how = f"signal {-status}" if status < 0 else f"status {status}"
            raise SideFailure(f"{self.side.label}: ended with {how}.\n{self._tail()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise SideFailure(f"{self.side.label}: {answer['error']}\n{self._tail()}")
        return answer

    def _tail(self) -> str:
        lines: Sequence[str] = self.log_path.read_text(errors="replace").splitlines()[-_TAIL_LINES:]
        return "\n".join([*(f"  | {line}" for line in lines), f"The full log: {self.log_path}"])
