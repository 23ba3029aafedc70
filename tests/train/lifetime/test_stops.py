"""Signals and time limits: of small programs, which import nothing else, and of a run."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from train.lifetime.stops import STOPPED, seconds_left

ROOT = Path(__file__).resolve().parents[3]
BEGIN = """
import os, signal, sys, time
sys.path.insert(0, {root!r})
from train.lifetime import stops
def wait(seconds):
    print("here", flush=True)
    time.sleep(seconds)
"""


def start(body: str) -> subprocess.Popen[str]:
    """Start a program that prints a line once it can be signalled."""
    program = BEGIN.format(root=str(ROOT)) + body
    started = subprocess.Popen([sys.executable, "-IS", "-c", program], stdout=subprocess.PIPE, text=True)
    assert started.stdout is not None
    assert started.stdout.readline() == "here\n"
    return started


def status_and_output(started: subprocess.Popen[str]) -> tuple[int, str]:
    printed, _ = started.communicate(timeout=30)
    return started.returncode, printed


INTERRUPTED = """
with stops.stop_requests(None, announced=False) as requests:
    try:
        wait(60)
    finally:
        print(requests.reason)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2], ids=lambda one: one.name)
def test_a_signal_interrupts_and_cleans_up(number: signal.Signals) -> None:
    started = start(INTERRUPTED)
    started.send_signal(number)
    assert status_and_output(started) == (STOPPED, f"{number.name}\n")


LOST = """
stops._AGAIN_SECONDS = 0.1
class Closed:
    def __del__(self):
        wait(60)
with stops.stop_requests(None, announced=False) as requests:
    try:
        Closed()
        time.sleep(60)
    finally:
        time.sleep(0.5)
        print(requests.reason)
"""


def test_a_signal_where_python_drops_exceptions_interrupts_soon_after_and_once() -> None:
    started = start(LOST)
    started.send_signal(signal.SIGTERM)
    assert status_and_output(started) == (STOPPED, "SIGTERM\n")


def test_the_time_limit_interrupts() -> None:
    begun = time.monotonic()
    started = start(INTERRUPTED.replace("None", "0.4"))
    assert status_and_output(started) == (STOPPED, "the time limit\n")
    assert time.monotonic() - begun > 0.4


SAFE_POINTS = """
with stops.stop_requests(None, announced=False):
    with stops.at_safe_points() as requested:
        while not requested():
            wait(0.05)
        print("requested", flush=True)
        time.sleep(PAUSE)
        print("saved", flush=True)
    print("not reached")
"""


def test_between_safe_points_nothing_is_raised() -> None:
    started = start(SAFE_POINTS.replace("PAUSE", "0.2"))
    # Slurm and torchrun both send it.
    for number in (signal.SIGTERM, signal.SIGUSR1):
        started.send_signal(number)
    status, printed = status_and_output(started)
    assert (status, printed.splitlines()[-1]) == (STOPPED, "saved")


def wait_until_printed(started: subprocess.Popen[str], line: str) -> None:
    assert started.stdout is not None
    while (printed := started.stdout.readline()) != f"{line}\n":
        assert printed


def test_a_second_signal_ends_at_once() -> None:
    started = start("stops.SAME_EVENT_SECONDS = 0.1\n" + SAFE_POINTS.replace("PAUSE", "60"))
    started.send_signal(signal.SIGUSR1)
    wait_until_printed(started, "requested")
    time.sleep(0.2)
    started.send_signal(signal.SIGTERM)
    status, printed = status_and_output(started)
    assert status == 128 + signal.SIGTERM
    assert "saved" not in printed


REPLACED = """
with stops.stop_requests(None, announced=False), stops.stop_not_replaced():
    try:
        try:
            wait(60)
        finally:
            raise KeyError  # a library, as it cleans up
    except KeyError:
        raise ValueError from None
"""


def test_an_error_of_a_library_that_is_interrupted_does_not_replace_the_stop() -> None:
    started = start(REPLACED)
    started.send_signal(signal.SIGTERM)
    assert status_and_output(started) == (STOPPED, "")


FORKED = """
with stops.stop_requests(None, announced=False) as requests:
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    os.kill(child, signal.SIGTERM)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    wait(0.2)
    print(status, requests.reason)
"""


def test_the_signals_of_a_forked_child_are_not_the_runs() -> None:
    assert status_and_output(start(FORKED)) == (0, f"{-signal.SIGTERM} None\n")


def test_a_slurm_job_stops_before_its_end() -> None:
    assert seconds_left(None, {}, 1000.0) is None
    assert seconds_left(None, {"SLURM_JOB_END_TIME": "4600"}, 1000.0) == 3600 - 120
    assert seconds_left(None, {"SLURM_JOB_END_TIME": "1100"}, 1000.0) == 90
    assert seconds_left(None, {"SLURM_JOB_END_TIME": "900"}, 1000.0) == 0
    assert seconds_left(None, {"SLURM_JOB_END_TIME": "Unknown"}, 1000.0) is None
    assert seconds_left(5, {"SLURM_JOB_END_TIME": "1100"}, 1000.0) == 300
