"""The soak: training, kills in some minutes and none in others, and what came of it."""

import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from data.processes.parent import module_command
from eagle31.errors import UserError
from eagle31.json_files import read_jsonl
from train.bench.soak.inputs import SoakRuns, make_runs
from train.bench.soak.processes import Program, Sample
from train.bench.soak.slopes import Slope, slope_of
from train.bench.soak.victims import Producers, Servers, Victims

MAX_DIFFERENCE = 1e-3  # of a state, relative to the largest: batches differ from run to run
MIN_THROUGHPUT = 0.7
DISTURBED_OF_CYCLE = 3, 4  # of so many periods, so many begin with a kill
MAX_MEMORY_GROWTH = 0.05  # of the mean, over the time of the soak
MAX_GROWTH = 1.0  # of files and threads
_WARM_UP = 0.2  # the part of the time that slopes leave out: caches fill
_POLL_SECONDS, _MEASURE_SECONDS = 0.5, 5.0
_START_SECONDS = 900.0


@dataclass
class Period:
    """A time with or without a kill at its beginning."""

    disturbed: bool
    killed: str | None = None
    seconds: float = 0.0
    steps: int = 0


def run_soak(work: Path, source: str, minutes: float, every_seconds: float) -> dict[str, Any]:
    """Train online for so many minutes, and return what was measured.

    Args:
        work: a new directory.
        source: who runs the target, a key of `SOURCES`.
        every_seconds: the length of a period.

    Raises:
        UserError: the run ended or did not begin.
    """
    runs = make_runs(work)
    _say("capturing the reference")
    reference = _trainer(["-", "-", *runs.reference()], work / "reference.log")
    if reference.process.wait() != 0:
        raise UserError("--work", work, f"The reference failed: {reference.tail}")
    with ExitStack() as programs:
        servers = None
        if source == "vllm":
            _say("starting the servers")
            servers = Servers(runs, work / "servers.log")
            programs.callback(servers.program.end)
            servers.wait_until_ready()
        settings = runs.training(source, servers.urls if servers else [])
        training = _trainer([str(work / "reference"), str(runs.records), *settings], work / "training.log")
        programs.callback(training.end)
        measured = _disturb(training, servers, runs, 60 * minutes, every_seconds)
        status = training.end()
    restarts = servers.restart_seconds if servers else []
    return _result(runs, measured, status, source, minutes) | {"restart_seconds": restarts}


def _trainer(arguments: list[str], log: Path) -> Program:
    return Program([*module_command("train.bench.soak.trainer"), *arguments], log)


@dataclass
class _Measured:
    periods: list[Period]
    samples: list[Sample]


def _disturb(
    training: Program, servers: Servers | None, runs: SoakRuns, seconds: float, every_seconds: float
) -> _Measured:
    """Kill a process at the beginning of most periods.

    A period without a kill begins once all that was killed before runs again.
    """
    metrics = _Steps(runs.output)
    victims: Victims = servers or Producers(training)
    programs = [training, *([servers.program] if servers else [])]
    deadline = time.monotonic() + _START_SECONDS
    while metrics.newest() < 10:
        if not training.running or time.monotonic() > deadline:
            raise UserError("--work", runs.work, f"The run did not begin: {training.tail}")
        time.sleep(_POLL_SECONDS)
    began = next_measure = time.monotonic()
    measured = _Measured([], [])
    while time.monotonic() - began < seconds:
        number = len(measured.periods)
        period = Period(is_disturbed(number))
        started, first = time.monotonic(), metrics.newest()
        while (now := time.monotonic()) - started < every_seconds or (
            not victims.ready() and not is_disturbed(number + 1)
        ):
            for program in programs:
                if not program.running:
                    raise UserError("--work", runs.work, f"A program has ended: {program.tail}")
            if period.disturbed and period.killed is None:
                period.killed = victims.kill_next()
            if now >= next_measure:
                next_measure += _MEASURE_SECONDS
                measured.samples += chain.from_iterable(one.measure(now - began) for one in programs)
            victims.ready()
            time.sleep(_POLL_SECONDS)
        period.seconds, period.steps = time.monotonic() - started, metrics.newest() - first
        measured.periods.append(period)
        _say(
            f"{now - began:.0f} s: {period.steps} steps in {period.seconds:.0f} s, "
            f"killed {period.killed or 'nothing'}"
        )
    return measured


def is_disturbed(period: int) -> bool:
    """Return whether a period begins with a kill."""
    return period % DISTURBED_OF_CYCLE[1] < DISTURBED_OF_CYCLE[0]


class _Steps:
    """The newest step in a run's metrics.jsonl, of which only what is new is read."""

    def __init__(self, output: Path) -> None:
        self._output, self._offset, self._newest = output, 0, 0

    def newest(self) -> int:
        paths = list(self._output.glob("artifacts/train-*/metrics.jsonl"))
        if paths:
            with paths[0].open("rb") as file:
                file.seek(self._offset)
                new = file.read()
            lines = new[: new.rfind(b"\n") + 1]
            self._offset += len(lines)
            self._newest += lines.count(b'"kind": "train"')
        return self._newest


def _result(runs: SoakRuns, measured: _Measured, status: int, source: str, minutes: float) -> dict[str, Any]:
    records = read_jsonl(runs.records)
    counts = Counter(sample for one in records for sample in one["samples"])
    num_samples = _num_samples(runs)
    times = [counts[index] for index in range(num_samples)]
    rates = {
        kind: _rate([one for one in measured.periods if one.disturbed is kind]) for kind in (True, False)
    }
    slopes = {
        kind: _slopes(kind, measured.samples) for kind in sorted({one.kind for one in measured.samples})
    }
    result: dict[str, Any] = {
        "source": source,
        "minutes": minutes,
        "kills": dict(Counter(one.killed for one in measured.periods if one.killed)),
        "steps": sum(one.steps for one in measured.periods),
        "samples": num_samples,
        "reads": sum(times),
        "fewest_reads_of_a_sample": min(times),
        "most_reads_of_a_sample": max(times),
        "largest_difference": max(one["difference"] for one in records),
        "left_in_spools": sum(path.is_file() for path in runs.spools.rglob("*")),
        "steps_per_second": {"disturbed": rates[True], "undisturbed": rates[False]},
        "throughput_of_undisturbed": rates[True] / rates[False],
        "slopes": {kind: {name: asdict(one) for name, one in own.items()} for kind, own in slopes.items()},
        "status": status,
        "periods": [asdict(one) for one in measured.periods],
    }
    # The trainer runs all the time; what is killed begins again each time.
    trainer, hours = slopes["trainer"], minutes / 60 * (1 - _WARM_UP)
    checks = {
        "every sample once in each epoch": max(times) - min(times) <= 1,
        "states as captured without kills": result["largest_difference"] <= MAX_DIFFERENCE,
        "nothing left in the spool": result["left_in_spools"] == 0,
        "memory flat": trainer["memory_bytes"].per_hour * hours
        <= MAX_MEMORY_GROWTH * trainer["memory_bytes"].mean,
        "files flat": trainer["files"].per_hour * hours <= MAX_GROWTH,
        "threads flat": trainer["threads"].per_hour * hours <= MAX_GROWTH,
        "throughput": result["throughput_of_undisturbed"] >= MIN_THROUGHPUT,
    }
    return result | {"checks": checks, "passed": all(checks.values())}


def _num_samples(runs: SoakRuns) -> int:
    from data.store import HiddenStateStore

    [directory] = (runs.work / "reference").glob("artifacts/capture-*/train")
    return len(HiddenStateStore(directory))


def _rate(periods: Sequence[Period]) -> float:
    return sum(one.steps for one in periods) / sum(one.seconds for one in periods)


def _slopes(kind: str, samples: Sequence[Sample]) -> dict[str, Slope]:
    own = [one for one in samples if one.kind == kind]
    own = own[int(_WARM_UP * len(own)) :]
    seconds = [one.seconds for one in own]
    names = ("memory_bytes", "files", "threads", "processes")
    if len(own) < 4:
        return {}
    return {name: slope_of(seconds, [getattr(one, name) for one in own]) for name in names}


def _say(line: str) -> None:
    print(f"soak: {line}", file=sys.stderr, flush=True)
