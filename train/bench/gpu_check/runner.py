"""Runs each part in its own process with a time limit. Whatever happens to one, the next one starts."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from train.bench.gpu_check.part import Part
from train.bench.gpu_check.record import Findings, Options, read_findings

ROOT = Path(__file__).resolve().parents[3]
PASSED, FAILED, NOT_RUN = "passed", "failed", "not run"
_LOG_LINES = 40
_END_SECONDS = 20.0  # more than a part gives its own processes
_DRY_RUN_FACTOR = 4  # on how much slower a machine a dry run may be


@dataclass(frozen=True)
class Outcome:
    """A part's status, its findings, and the end of its log."""

    part: Part
    status: str
    seconds: float
    findings: Findings
    log: Path | None
    log_tail: str

    def to_json(self) -> dict[str, Any]:
        found = {"name": self.part.name, "title": self.part.title, "status": self.status}
        log = {"log": str(self.log) if self.log else None, "log_tail": self.log_tail}
        return found | {"seconds": round(self.seconds, 1)} | vars(self.findings) | log


def run_part(part: Part, options: Options, environment: Mapping[str, str], seconds_left: float) -> Outcome:
    """Run one part; end it, and every process that it has started, when its time is over.

    Args:
        environment: of the part's process.
        seconds_left: of the whole check.
    """
    if options.num_gpus < part.gpus and not options.dry_run:
        return _left_out(part, f"It needs {part.gpus} GPUs; this machine has {options.num_gpus}.")
    if seconds_left <= 0:
        return _left_out(part, "The time of the whole check was over; --minutes gives it more.")
    directory = options.directory / "parts"
    directory.mkdir(parents=True, exist_ok=True)
    findings, log = directory / f"{part.name}.json", directory / f"{part.name}.log"
    findings.unlink(missing_ok=True)
    limit = min(part.seconds * (_DRY_RUN_FACTOR if options.dry_run else 1), seconds_left)
    worker = ["-m", "train.bench.gpu_check.worker", part.module, str(findings)]
    started = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, *worker, json.dumps(options.to_json())],
            cwd=ROOT,
            env={**environment, **part.environment},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status: int | None = process.wait(timeout=limit)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            end_session(process, _END_SECONDS)
    found = read_findings(findings)
    if status is None:
        found.error = f"It was ended after {limit:.0f} seconds."
    elif found.error is None and not found.finished:
        how = f"signal {-status}" if status < 0 else f"status {status}"
        found.error = f"Its process ended with {how}."
    tail = _tail(log)
    if found.error is not None:
        found.error = with_reason(found.error, tail)
    return Outcome(part, status_of(found), time.monotonic() - started, found, log, tail)


def with_reason(error: str, log_tail: str) -> str:
    """Return the error with the last message of a command that the part has run, if the log ends with one."""
    messages = re.findall(r"\berror: (.+)", log_tail)
    return error if not messages or messages[-1] in error else f"{error} {messages[-1]}"


def status_of(found: Findings) -> str:
    if found.error is not None or not all(one["passed"] for one in found.checks):
        return FAILED
    return NOT_RUN if found.not_run is not None else PASSED


def end_session(process: subprocess.Popen, patience_seconds: float = 5.0) -> None:
    """End a process that leads a session, and all others in it."""
    for number, patience in ((signal.SIGTERM, patience_seconds), (signal.SIGKILL, 1.0)):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        deadline = time.monotonic() + patience
        while time.monotonic() < deadline and _alive(process):
            time.sleep(0.1)
    process.wait()


def _alive(process: subprocess.Popen) -> bool:
    process.poll()  # a process that has ended and is not waited for still counts as one of its group
    try:
        os.killpg(process.pid, 0)
    except ProcessLookupError:
        return False
    return True


def _left_out(part: Part, reason: str) -> Outcome:
    return Outcome(part, NOT_RUN, 0.0, Findings(not_run=reason), None, "")


def _tail(log: Path) -> str:
    lines: Sequence[str] = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join(lines[-_LOG_LINES:])
