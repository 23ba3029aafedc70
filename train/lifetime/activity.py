"""What this process is doing, for messages about a run that stops or hangs."""

import os
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]
_SHOWN_FRAMES = 8


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


def main_stack() -> str:
    """Return where the main thread is: its innermost frames, one per line, the innermost last."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    found = traceback.extract_stack(frame)[-_SHOWN_FRAMES:] if frame is not None else []
    return "\n".join(f"  {_shown(one.filename)}:{one.lineno} in {one.name}" for one in found)


def _shown(file: str) -> str:
    path = Path(os.path.abspath(file))
    if path.is_relative_to(_ROOT):
        return str(path.relative_to(_ROOT))
    return "/".join(path.parts[-3:])
