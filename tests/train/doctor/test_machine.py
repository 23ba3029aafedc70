"""Memory and limits."""

import re
import resource
from pathlib import Path

import pytest

from train.doctor.check import Status
from train.doctor.machine import (
    available_memory,
    locked_memory_check,
    memory_check,
    open_files_check,
    shared_memory_check,
)

GB = 10**9


def test_too_little_memory_is_a_warning_as_the_need_is_an_estimate() -> None:
    assert memory_check(8 * GB, 3 * GB, "training").status is Status.ok
    check = memory_check(2 * GB, 3 * GB, "training")
    assert (check.status, check.needed) == (Status.warning, "3 GB for training")


def test_memory_is_what_this_machine_has() -> None:
    [total] = re.findall(r"MemTotal: *(\d+)", Path("/proc/meminfo").read_text())
    assert 0 < available_memory() <= 1024 * int(total)


@pytest.mark.parametrize(
    ("soft", "hard", "status", "said"),
    [
        (1024, 4096, Status.ok, ""),
        (64, 4096, Status.warning, "ulimit -n 384."),
        (64, 64, Status.warning, "the hard limit is 64, ask the administrator."),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, Status.ok, ""),
    ],
)
def test_open_files(soft: int, hard: int, status: Status, said: str) -> None:
    check = open_files_check(soft, hard, 384)
    assert check.status is status
    assert check.remedy.endswith(said)


def test_a_small_shm_is_lacking_only_where_something_is_there() -> None:
    assert shared_memory_check(64 << 20, 0, "", "Mount it larger.").status is Status.ok
    check = shared_memory_check(64 << 20, 4 * GB, "capture.spool_gb", "Mount it larger.")
    assert (check.status, check.remedy) == (Status.lacking, "Mount it larger.")
    assert (check.found, check.needed) == ("67.1 MB free", "4 GB for capture.spool_gb")


def test_locked_memory_matters_to_rdma_alone() -> None:
    assert locked_memory_check(8 << 20, None).status is Status.ok
    assert locked_memory_check(8 << 20, "InfiniBand").status is Status.warning
    assert locked_memory_check(resource.RLIM_INFINITY, "InfiniBand").status is Status.ok
