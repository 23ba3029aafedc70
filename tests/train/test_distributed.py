"""What a process of a run does before the others are known."""

import os
import re
import signal
import time
from itertools import count
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from eagle31.errors import UserError
from tests.processes import free_ports
from tests.processes import wait_for as wait_for_output
from tests.runs.forked import start
from train import distributed
from train.distributed import World, ending, made_by_main, read_when_set, wait_for, wait_for_ranks

WORKER = "tests/train/lost_rank_worker.py"


@pytest.mark.parametrize("variable", [None, "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_segments_expand_unless_the_user_has_configured_the_allocator(
    variable: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Mock()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", Mock())
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", settings)
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    if variable is not None:
        monkeypatch.setenv(variable, "max_split_size_mb:512")
    World(rank=1, local_rank=1, size=2).use_device()
    assert settings.call_args_list == ([] if variable else [(("expandable_segments:True",),)])
    with pytest.raises(UserError, match=r"--nproc-per-node=3: This node has 2 GPUs"):
        World(rank=2, local_rank=2, size=3).use_device()


@pytest.fixture
def values(monkeypatch: pytest.MonkeyPatch) -> dist.Store:
    """Return the store that the ranks of this process share."""
    store = dist.HashStore()
    monkeypatch.setattr(distributed, "shared_values", lambda: store)
    return store


def test_a_failure_of_one_rank_ends_the_waits_of_the_others(values: dist.Store, tmp_path: Path) -> None:
    one, other = World(rank=0, local_rank=0, size=2), World(rank=1, local_rank=0, size=2)
    failure, later = UserError("vllm.servers", "x", "It does not start."), ValueError("a later one")
    assert ending(failure, other) is failure
    assert ending(later, one) is later
    for wait in (
        lambda: wait_for(tmp_path / "nothing"),
        lambda: wait_for_ranks(one),
        lambda: read_when_set(values, "key"),
    ):
        with pytest.raises(UserError, match=r"rank 1 on .*=UserError: vllm\.servers=x: It does not start\."):
            wait()


@pytest.mark.usefixtures("values")
def test_a_broken_connection_becomes_what_ended_the_other_rank() -> None:
    one, other = World(rank=0, local_rank=0, size=2), World(rank=1, local_rank=0, size=2)
    gloo = RuntimeError("[/x/gloo/transport/tcp/pair.cc:553] Connection closed by peer.\n Check it.")
    nccl = dist.DistBackendError("NCCL error")
    alone = ending(gloo, World(rank=0, local_rank=0, size=1))
    assert re.fullmatch(r"rank 0 on .*=the connection .*: \[/x/.*peer\. Check it\. See what .*", str(alone))
    ending(ValueError("a.b"), other)
    for error in (gloo, nccl):
        assert re.fullmatch(r"rank 1 on .*=ValueError: a\.b", str(ending(error, one)))


def test_a_store_that_cannot_be_reached_is_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_ports(1)[0])}
    for name, value in rank.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(distributed, "_STORE_SECONDS", 0.5)
    with pytest.raises(UserError, match=r"MASTER_ADDR=127\.0\.0\.1: torchrun's store cannot be reached"):
        distributed.shared_values.__wrapped__()


def test_a_lost_rank_ends_the_others_within_a_minute() -> None:
    # Rank 0 sees a sign of life up to a beat later, counts in beats, and the others look once in a beat.
    assert distributed.SILENT_SECONDS + 3 * distributed.BEAT_SECONDS < 60


@pytest.mark.parametrize(
    ("lost", "sent", "said"),
    [
        (1, "SIGKILL", "error: rank 1=silent for"),
        (0, "SIGKILL", "error: rank 0=its node is gone"),
        (0, "SIGSTOP", "error: rank 0=silent for"),  # its connections stay, as where a node has no power
    ],
)
def test_a_node_that_dies_ends_the_others(lost: int, sent: str, said: str, tmp_path: Path) -> None:
    ranks = start(WORKER, lost, sent, log=tmp_path / "log", num_processes=2, num_nodes=2)
    try:
        for one in ranks.processes:
            one.join(100)
        assert ranks.processes[1 - lost].exitcode == 1
    finally:
        ranks.kill()
    assert said in ranks.printed()


def test_a_run_that_was_suspended_continues(tmp_path: Path) -> None:
    log = tmp_path / "log"
    ranks = start(WORKER, -1, "SIGKILL", log=log, num_processes=2, num_nodes=2)
    try:
        wait_for_output(lambda: log.exists() and ranks.printed().count("seen") == 2)
        ranks.send_signal(signal.SIGSTOP)
        time.sleep(4)  # twice as long as a rank may be silent
        for one in ranks.processes:  # rank 0 first
            assert one.pid is not None
            os.kill(one.pid, signal.SIGCONT)
            time.sleep(1)
        assert all(one.is_alive() for one in ranks.processes), ranks.printed()
    finally:
        ranks.kill()


@pytest.mark.usefixtures("values")
def test_what_rank_0_makes_counts_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    makers = [lambda: [("rank", 0)], lambda: pytest.fail("another rank makes it, too")]
    for rank, make in enumerate(makers):
        monkeypatch.setattr(distributed, "_numbers", count())  # each is a process
        assert made_by_main(make, World(rank=rank, local_rank=rank, size=2)) == [["rank", 0]]
