"""Which failures are explained by the machine, and how."""

import errno
import os
from pathlib import Path

import pytest
import torch

from eagle31.errors import UserError
from tests.bad_input.faults import open_file_limit, small_disk
from tests.train.torchrun import composed
from train.distributed import World
from train.doctor.examine import Topic
from train.doctor.failures import explanation, topics_of

ALONE = World(rank=0, local_rank=0, size=1)


def os_error(number: int) -> OSError:
    return OSError(number, os.strerror(number))


@pytest.mark.parametrize(
    ("error", "topic"),
    [
        (os_error(errno.ENOSPC), Topic.disk),
        (RuntimeError("I/O error: No space left on device (os error 28)"), Topic.disk),
        (os_error(errno.EMFILE), Topic.limits),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), Topic.gpus),
        (RuntimeError("NCCL error in: ProcessGroupNCCL.cpp:77, unhandled system error"), Topic.gpus),
        (os_error(errno.EADDRINUSE), Topic.ports),
        (UserError("vllm.servers", "http://node1:8000", "It did not answer."), Topic.servers),
        (os_error(errno.ENOLCK), Topic.locks),
        (os_error(errno.EROFS), Topic.permission),
        (MemoryError(), Topic.memory),
    ],
    ids=lambda value: value.name if isinstance(value, Topic) else type(value).__name__,
)
def test_a_failure_is_about_a_part_of_the_machine(error: Exception, topic: Topic) -> None:
    assert topic in topics_of(error)


def test_a_cause_counts_unless_it_is_left_out() -> None:
    error = RuntimeError("unexpected pos 128 vs 22")
    error.__cause__ = os_error(errno.ENOSPC)
    assert topics_of(error) == topics_of(os_error(errno.ENOSPC))
    error.__cause__ = None  # as after `from None`
    error.__context__ = os_error(errno.ENOSPC)
    assert topics_of(error) == set()


def test_other_failures_are_not_explained(tmp_path: Path) -> None:
    config = composed("quickstart", f"output_dir={tmp_path}")
    for error in (ValueError("shapes differ"), UserError("optim.lr", 7, "Give less."), KeyError("NC")):
        assert explanation(error, config, ALONE) == []


def test_the_explanation_has_the_rows_that_matter(tmp_path: Path) -> None:
    config = composed("quickstart", f"output_dir={tmp_path / 'disk'}", f"cache_dir={tmp_path}")
    with small_disk(tmp_path / "disk", 1 << 20):
        lines = explanation(os_error(errno.ENOSPC), config, ALONE)
    assert lines[0] == "this machine, as scripts/doctor sees it:"
    [row] = [line for line in lines if "lacking" in line]
    assert row.split()[:4] == ["lacking", "disk", "1.05", "MB"]
    assert not any("Python" in line for line in lines)
    with open_file_limit(100):
        lines = explanation(os_error(errno.EMFILE), config, ALONE)
    assert any(line.split()[:4] == ["warning", "open", "files", "100"] for line in lines)
