"""A signal that comes while a run imports what it needs stops it like a later one."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from eagle31.json_files import read_json
from tests.train.lifetime.test_stops import start, status_and_output, wait_until_printed
from tests.train.torchrun import ROOT, environment
from train.lifetime.stops import STOPPED, STOPPED_FILE

HELD = """
from train.lifetime import held_signals
held_signals.SAME_EVENT_SECONDS = 0.1
held_signals.hold_signals()
wait(0)
while not held_signals._held:
    time.sleep(0.01)
print("held", flush=True)
time.sleep(PAUSE)
with stops.stop_requests(None, announced=False) as requests:
    try:
        held_signals.release_signals()
        print("not reached")
    finally:
        print(requests.reason, flush=True)
"""


def test_a_held_signal_stops_the_run_once_it_can() -> None:
    started = start(HELD.replace("PAUSE", "0"))
    started.send_signal(signal.SIGUSR1)
    assert status_and_output(started) == (STOPPED, "held\nSIGUSR1\n")


def test_a_second_signal_ends_at_once() -> None:
    started = start(HELD.replace("PAUSE", "60"))
    started.send_signal(signal.SIGUSR1)
    wait_until_printed(started, "held")
    time.sleep(0.2)
    started.send_signal(signal.SIGTERM)
    assert status_and_output(started) == (128 + signal.SIGTERM, "")


def test_after_the_run_a_signal_has_its_default_action() -> None:
    body = "from train.lifetime import held_signals\nheld_signals.hold_signals()\n"
    body += "with stops.stop_requests(None, announced=False):\n    held_signals.release_signals()\nwait(60)\n"
    started = start(body)
    started.send_signal(signal.SIGTERM)
    assert status_and_output(started) == (-signal.SIGTERM, "")


def test_a_signal_to_a_run_that_has_imported_nothing_yet(tmp_path: Path) -> None:
    """A real interpreter; the signal is sent as soon as the kernel would not end the process with it."""
    command = [sys.executable, "train/main.py", "recipe=quickstart", f"output_dir={tmp_path / 'run'}"]
    with subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=subprocess.DEVNULL) as started:
        deadline = time.monotonic() + 60
        while not catches(started.pid, signal.SIGTERM):
            assert time.monotonic() < deadline
            time.sleep(0.001)
        assert "libtorch" not in Path(f"/proc/{started.pid}/maps").read_text()
        started.send_signal(signal.SIGTERM)
        assert started.wait(timeout=240) == STOPPED
    stopped = read_json(tmp_path / "run" / STOPPED_FILE)
    assert (stopped["reason"], stopped["stage"]) == ("SIGTERM", "start")
    assert os.listdir(tmp_path / "run") == [STOPPED_FILE]


def catches(process: int, number: signal.Signals) -> bool:
    """Return whether a process has a handler for a signal."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    [caught] = (line.split()[1] for line in lines if line.startswith("SigCgt:"))
    return bool(int(caught, 16) >> (number - 1) & 1)
