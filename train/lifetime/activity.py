"""What this process is doing, for messages about a run that stops or hangs."""

import os
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]
_SHOWN_FRAMES = 8
_OPERATIONS = "torch/distributed/distributed_c10d.py"


@dataclass
class Activity:
    """The stage and step of this process, and for what of the other ranks it waits, if it does."""

    stage: str = "start"
    step: int | None = None
    waits_for: str | None = None

    def enter(self, stage: str) -> None:
        """Note that a stage begins."""
        self.stage, self.step = stage, None

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Note that this rank waits for the others, outside of a collective operation."""
        self.waits_for = what
        try:
            yield
        finally:
            self.waits_for = None

    def __str__(self) -> str:
        return f"stage {self.stage}" + ("" if self.step is None else f", step {self.step}")


ACTIVITY = Activity()


def main_frames() -> list[traceback.FrameSummary]:
    """Return where the main thread is: its innermost frames, the innermost last."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return traceback.extract_stack(frame)[-_SHOWN_FRAMES:] if frame is not None else []


def shown(frames: Sequence[traceback.FrameSummary]) -> str:
    """Return frames as text, one per line."""
    return "\n".join(f"  {_shown(one.filename)}:{one.lineno} in {one.name}" for one in frames)


def operation_in(frames: Sequence[traceback.FrameSummary]) -> str | None:
    """Return the function of torch.distributed in which a thread is, if it is in one."""
    names = [one.name for one in frames if one.filename.endswith(_OPERATIONS)]
    return names[-1] if names else None


def _shown(file: str) -> str:
    path = Path(os.path.abspath(file))
    if path.is_relative_to(_ROOT):
        return str(path.relative_to(_ROOT))
    return "/".join(path.parts[-3:])
