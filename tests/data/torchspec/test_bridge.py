"""The bridge's messages to its parent, with a fake Ray; test_states.py has the real engines."""

import os
import queue
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from data.processes.child import Message
from data.processes.parent import ChildProcess
from data.torchspec.settings import bridge_command

FAKE_RAY = Path(__file__).with_name("fake_ray")
SECONDS = 60.0


@contextmanager
def running(directory: Path, answered: Callable[[Message], None], **settings: Any) -> Iterator[ChildProcess]:
    process = ChildProcess(
        bridge_command(sys.executable),
        {"leads": False, "start_seconds": 0.0} | settings,
        environment=os.environ | {"PYTHONPATH": str(FAKE_RAY)},
        answered=answered,
        log=directory / "log",
        directory=directory,
    )
    try:
        yield process
    finally:
        process.kill()


def test_every_request_is_answered_and_one_that_fails_refuses_no_other(tmp_path: Path) -> None:
    answers: queue.Queue[Message] = queue.Queue()
    with running(tmp_path, answers.put, namespace="run") as process:
        # It answers what was sent while it was still starting.
        for key, ids in {"a": [1, 2], "bad": [-1], "b": [3]}.items():
            process.send({"key": key, "input_ids": ids})
        found = {answer["key"]: answer for answer in (answers.get(timeout=SECONDS) for _ in range(3))}
        assert process.ready == {"prenorm": True, "num_engines": 1}
        assert found["bad"] == {"key": "bad", "refused": "index out of range"}
        for key in ("a", "b"):
            assert found[key]["stored"].startswith(f"{key}-")
        process.close(SECONDS)
        assert process.exit_description == "status 0"
    assert process.log_tail() == ["Ray prints to stdout."]


def test_a_bridge_that_cannot_start_says_why(tmp_path: Path) -> None:
    with running(tmp_path, print, namespace="none") as process:
        assert not process.wait_until_ready(SECONDS)
        process.close(SECONDS)
    assert process.failure == "ValueError: no actor eagle31-engines"
    assert process.exit_description == "status 1"
