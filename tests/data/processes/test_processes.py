"""Both sides of a child process that JSON lines drive."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from data.processes import child, parent
from data.processes.child import Message
from data.processes.parent import ChildProcess, without_launcher

SECONDS = 60.0
# Loads the child's side by its location, with the standard library alone.
OPEN = f"""
import importlib.util, os, sys, time
spec = importlib.util.spec_from_file_location("channel", {child.__file__!r})
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
assert not {{"torch", "numpy", "data"}} & set(sys.modules)
"""
ECHO = f"""{OPEN}
channel = module.Channel()
print("a library prints")
channel.ready(settings=channel.settings)
while (request := channel.requests.get()) is not None:
    if request == {{"die": True}}:
        os.write(channel._answers.fileno(), b'{{"half": ')
        os._exit(3)
    channel.answer({{"echo": request}})
channel.answer({{"last": True}})
"""
FAIL = f"""{OPEN}
channel = module.Channel()
channel.fail(["field", 1, "remedy"])
sys.exit(1)
"""


def start(script: str, answered: Callable[[Message], None], log: Path | None = None) -> ChildProcess:
    command = [sys.executable, "-c", script]
    return ChildProcess(command, {"a": 1}, environment=dict(os.environ), answered=answered, log=log)


@pytest.mark.parametrize("logs_to_file", [False, True])
def test_a_child_answers_to_the_end_and_its_prints_are_apart(logs_to_file: bool, tmp_path: Path) -> None:
    answers: list[Message] = []
    process = start(ECHO, answers.append, tmp_path / "logs" / "log" if logs_to_file else None)
    large = {"ids": list(range(200_000))}  # more than a pipe holds
    for request in (large, {"b": 2}):
        process.send(request)
    process.close(SECONDS)
    assert answers == [{"echo": large}, {"echo": {"b": 2}}, {"last": True}]
    assert process.ready == {"settings": {"a": 1}}
    assert (process.alive, process.exit_description, process.failure) == (False, "status 0", None)
    assert process.log_tail() == ["a library prints"]


def test_a_death_in_the_middle_of_an_answer_is_reported_once() -> None:
    answers: list[Message] = []
    ends: list[bool] = []
    process = ChildProcess(
        [sys.executable, "-c", ECHO],
        {},
        environment=dict(os.environ),
        answered=answers.append,
        ended=lambda: ends.append(process.alive),
    )
    assert process.wait_until_ready(SECONDS)
    process.send({"die": True})
    process.send({"lost": True})
    process.close(SECONDS)
    assert (answers, ends, process.exit_description) == ([], [False], "status 3")
    process.send({"late": True})  # lost as well, without an error


def test_a_child_that_knows_why_it_ends_says_so() -> None:
    process = start(FAIL, print)
    assert not process.wait_until_ready(SECONDS)
    process.close(SECONDS)
    assert (process.failure, process.exit_description) == (["field", 1, "remedy"], "status 1")


def test_a_child_that_does_not_end_is_killed() -> None:
    process = start(f"{OPEN}\nmodule.Channel().ready()\ntime.sleep(600)", print)
    assert process.wait_until_ready(SECONDS)
    started = time.monotonic()
    process.close(0.2)
    assert time.monotonic() - started < SECONDS / 2
    assert process.exit_description == "signal 9"


@pytest.mark.parametrize("stopped", [False, True])
def test_what_a_child_has_started_ends_with_it(stopped: bool) -> None:
    script = f"""{OPEN}
import subprocess
channel = module.Channel()
channel.ready(started=subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid)
while channel.requests.get() is not None:
    pass
"""
    process = start(script, lambda _: None)
    assert process.wait_until_ready(SECONDS)
    assert process.ready is not None
    started = psutil.Process(process.ready["started"])
    if stopped:
        psutil.Process(process.process_id).suspend()
        process.kill()
    process.close(SECONDS)
    assert not psutil.wait_procs([started], timeout=SECONDS)[1]


@pytest.mark.parametrize("exit_with_parent", [False, True])
def test_a_child_ends_with_its_parent_though_another_process_holds_the_pipe(
    exit_with_parent: bool, tmp_path: Path
) -> None:
    """It finishes what it does, unless it is to exit at once."""
    wrote = tmp_path / "wrote"
    script = f"""{OPEN}
channel = module.Channel(exit_with_parent={exit_with_parent})
channel.ready()
assert channel.requests.get() is None
open({str(wrote)!r}, "w").close()
"""
    parent_script = f"""
import json, os, sys, time
sys.path.insert(0, {str(Path(parent.__file__).parents[2])!r})
from data.processes.parent import ChildProcess
process = ChildProcess([sys.executable, "-c", {script!r}], {{}}, environment=dict(os.environ), answered=print)
assert process.wait_until_ready({SECONDS})
if forked := os.fork():
    print(json.dumps([forked, process.process_id]), flush=True)
time.sleep(600)
"""
    command = [sys.executable, "-c", parent_script]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as started:
        assert started.stdout is not None
        forked, running = (psutil.Process(pid) for pid in json.loads(started.stdout.readline()))
        try:
            started.kill()
            started.wait()
            assert not psutil.wait_procs([running], timeout=SECONDS)[1]
        finally:
            forked.kill()
    assert wrote.exists() is not exit_with_parent


def test_a_child_is_no_rank_of_the_run() -> None:
    assert without_launcher({"RANK": "1", "MASTER_ADDR": "a", "HOME": "h"}) == {"HOME": "h"}
