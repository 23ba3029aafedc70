"""The child's side of a process that JSON lines drive.

This module uses the standard library only and may be loaded by location, so that it works in every
environment.

The parent (`parent.py`) writes one JSON object per line: first the settings, then requests. The child answers
with one JSON object per line: `{"ready": ...}` once it is set up, then its answers, and `{"failed": ...}`
where it ends for a reason that it knows.
"""

import json
import os
import queue
import threading
import time
from typing import Any

Message = dict[str, Any]
_WATCH_SECONDS = 1.0


class Channel:
    """The connection to the process that started this one. It takes over stdin and stdout.

    A thread reads requests from the start, so that the parent never waits for a child that is still loading.

    Attributes:
        settings: what the parent sent first.
        requests: what it has sent since, then None when stdin or the parent has ended.

    Args:
        exit_with_parent: end this process at once when stdin or the parent ends, without a None.
    """

    def __init__(self, *, exit_with_parent: bool = False) -> None:
        self._exit_with_parent = exit_with_parent
        # Libraries print. Whatever they write to stdout goes to stderr, apart from the answers.
        self._answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)
        # Not sys.stdin, which Python closes at exit while the thread may still read.
        self._lines = os.fdopen(os.dup(0), "rb")
        self.requests: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        first = self._lines.readline()
        if not first.endswith(b"\n"):
            os._exit(0)  # The parent died before it had sent the settings.
        content = json.loads(first)
        self.settings: Message = content["settings"]
        threading.Thread(target=self._read, daemon=True).start()
        threading.Thread(target=self._watch, args=(content["parent"],), daemon=True).start()

    def ready(self, **content: Any) -> None:
        """Tell the parent that this process is set up."""
        self.answer({"ready": content})

    def answer(self, message: Message) -> None:
        """Send one answer."""
        self._answers.write(json.dumps(message) + "\n")
        self._answers.flush()

    def fail(self, reason: Any) -> None:
        """Tell the parent why this process is about to end. `reason` is any JSON value."""
        self.answer({"failed": reason})

    def _read(self) -> None:
        for line in self._lines:
            if not line.endswith(b"\n"):
                break  # The parent died in the middle of a request.
            self.requests.put(json.loads(line))
        self._end()

    def _watch(self, parent: int) -> None:
        # Another process may have inherited the other end of stdin, and keep it open.
        while os.getppid() == parent:
            time.sleep(_WATCH_SECONDS)
        self._end()

    def _end(self) -> None:
        if self._exit_with_parent:
            os._exit(0)
        self.requests.put(None)
