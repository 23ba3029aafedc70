"""A rank ends before the run: those of its node find it, tell those of other nodes, and end."""

import json
import subprocess
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch.distributed as dist

from data.processes.identity import Identity
from tests.train.torchrun import torchrun
from train.lifetime.departures import Departures, RankProcess, _left_name, _process_name

WORKER = str(Path(__file__).with_name("departures_worker.py"))


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "60"]) as started:
        yield started
        started.kill()


def never(_: str) -> int:
    raise AssertionError


def rank(store: dist.Store, number: int, *, node: int = 0) -> Departures:
    return Departures(store, number, 3, node, fail=never)


def say_begun(store: dist.Store, number: int, process: int, machine: str | None = None) -> None:
    """Say what rank `number` says when it begins, as a process of node 0."""
    identity = Identity.of(process)
    assert not identity.has_ended
    said = RankProcess("host", 0, process, replace(identity, machine=machine or identity.machine))
    store.set(_process_name(number), json.dumps(asdict(said)))


def test_a_rank_that_ends_early_is_found_on_its_node_and_on_others(process: subprocess.Popen[bytes]) -> None:
    store = dist.HashStore()
    here, elsewhere = rank(store, 0), rank(store, 2, node=1)
    assert here.found() is None  # rank 1 has not begun
    say_begun(store, 1, process.pid)
    assert here.found() is elsewhere.found() is None
    process.kill()
    process.wait()
    assert elsewhere.found() is None
    assert here.found() == f"rank 1 (process {process.pid} on host) has ended"
    assert elsewhere.found() == here.found()


def test_a_rank_that_has_left_may_end(process: subprocess.Popen[bytes]) -> None:
    store = dist.HashStore()
    here = rank(store, 0)
    say_begun(store, 1, process.pid)
    assert here.found() is None
    store.set(_left_name(1), "")
    process.kill()
    process.wait()
    assert here.found() is None


def test_a_process_of_another_container_is_not_looked_for(process: subprocess.Popen[bytes]) -> None:
    store = dist.HashStore()
    here = rank(store, 0)
    say_begun(store, 1, process.pid, machine="another")
    process.kill()
    process.wait()
    assert here.found() is None


def test_the_first_failure_is_the_cause() -> None:
    store = dist.HashStore()
    rank(store, 1).report_failure()
    rank(store, 2).report_failure()
    assert rank(store, 0).found() == "rank 1 has failed"


def test_the_other_ranks_end_with_one_that_is_killed(tmp_path: Path) -> None:
    """One of them is interrupted by torchrun's signal. The other one cannot be, and is ended."""
    printed = torchrun(WORKER, str(tmp_path), num_processes=3, check=False, seconds=120)
    assert "rank 0 cleans up\n" in printed
    assert "rank 0 ends by itself\n" in printed
    assert "rank 1 ends by itself" not in printed
    assert "error: rank 2 (process " in printed
    assert "has ended; rank 1 waits for it in vain, and ends\n" in printed
    # torchrun would have killed it after 30 s.
    assert "forcefully exiting" not in printed
    assert not (tmp_path / "stopped.json").exists()
