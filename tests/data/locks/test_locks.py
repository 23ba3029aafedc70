import errno
import fcntl
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from data.locks import LeaseTimes, file_lock, try_lock
from data.locks.file_lock import why_no_flock
from data.store.writer import StoreWriter
from eagle31.errors import UserError
from tests.data.locks.without_flock import LOCAL, answer_flock, be_node
from tests.data.store.samples import EXACT, make_sample

TIMES = LeaseTimes(renew=0.05, sure=0.3, expire=1.0, grace=0.1, poll=0.02)
FORK = multiprocessing.get_context("fork")
LUSTRE = "36 35 98:0 / {point} rw,noatime shared:1 - lustre mds@tcp:/home rw,{options}\n"


class Other:
    """Another process, which does what it is told and answers."""

    def __init__(self, serve: Callable[..., None], *arguments: object) -> None:
        self._pipe, theirs = FORK.Pipe()
        self.process = FORK.Process(target=serve, args=(theirs, *arguments), daemon=True)
        self.process.start()

    def ask(self, question: str) -> object:
        self._pipe.send(question)
        assert self._pipe.poll(30), question
        return self._pipe.recv()

    def kill(self, number: int = signal.SIGKILL) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)
        if number == signal.SIGKILL:
            self.process.join()


def _hold(pipe: Connection, path: Path, node: str, error: int = errno.ENOSYS) -> None:
    answer_flock(error)
    be_node(node)
    lock = None
    while question := pipe.recv():
        if question == "take":
            lock = try_lock(path, times=TIMES)
            pipe.send(lock is not None)
        elif question == "close":
            lock.close()
            pipe.send(True)
        else:
            try:
                lock.check()
                pipe.send("mine")
            except UserError as raised:
                pipe.send(str(raised))


def _write(pipe: Connection, directory: Path) -> None:
    answer_flock()
    writer = None
    while question := pipe.recv():
        try:
            if question == "open":
                writer = StoreWriter(directory, "a", EXACT, 15)
            else:
                writer.append(3, make_sample(3))
                writer.close()
            pipe.send("done")
        except UserError as raised:
            pipe.send(str(raised))


def test_the_kernel_answers_as_it_is_told(tmp_path: Path) -> None:
    def flock(pipe: Connection) -> None:
        answer_flock(errno.ENOLCK)
        with (tmp_path / "x").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX)
            except OSError as error:
                pipe.send(error.errno)

    mine, theirs = FORK.Pipe()
    FORK.Process(target=flock, args=(theirs,)).start()
    assert mine.poll(30)
    assert mine.recv() == errno.ENOLCK


@pytest.mark.parametrize("error", [errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK])
def test_without_flock_one_process_at_a_time_has_the_lock(tmp_path: Path, error: int) -> None:
    one, two = (Other(_hold, tmp_path / "lock", node, error) for node in ("n1", "n2"))
    assert one.ask("take")
    assert not two.ask("take")
    assert one.ask("close")
    assert two.ask("take")
    assert not one.ask("take")
    one.kill(), two.kill()


def test_a_lock_of_one_node_is_known_by_its_mount_and_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text(LUSTRE.format(point=tmp_path, options="localflock"))
    monkeypatch.setattr(file_lock, "_MOUNTS", mounts)
    one, two = (Other(_hold, tmp_path / "lock", node, LOCAL) for node in ("n1", "n2"))
    assert one.ask("take")
    assert not two.ask("take")
    one.kill(), two.kill()
    assert "lustre is mounted with localflock); leases in files are used instead" in capfd.readouterr().err


def test_mounts_say_where_flock_reaches_other_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mounts = tmp_path / "mountinfo"
    monkeypatch.setattr(file_lock, "_MOUNTS", mounts)
    mounts.write_text(
        "22 1 8:1 / / rw,relatime - ext4 /dev/sda1 rw\n"
        + LUSTRE.format(point="/lustre", options="flock")
        + LUSTRE.format(point="/lustre/local\\040files", options="lazystatfs,localflock")
        + "40 22 0:40 / /home rw - nfs4 server:/home rw,vers=4.2,local_lock=none\n"
        + "41 22 0:41 / /old rw - nfs server:/old rw,vers=3,nolock,local_lock=all\n"
        + "42 22 0:42 / /bee rw - beegfs beegfs_nodev rw\n"
    )
    for path in ("/tmp/x", "/lustre/x", "/lustre/locals", "/home/user/x"):
        assert why_no_flock(Path(path)) is None, path
    for path, reason in {
        "/lustre/local files/x": "lustre is mounted with localflock",
        "/old/x": "nfs is mounted with local_lock=all, nolock",
        "/bee/x": "beegfs locks on one node",
    }.items():
        assert why_no_flock(Path(path)) == reason


def test_a_killed_holder_on_another_node_is_replaced_after_its_lease(tmp_path: Path) -> None:
    one, two = (Other(_hold, tmp_path / "lock", node) for node in ("n1", "n2"))
    assert one.ask("take")
    one.kill()
    started = time.monotonic()
    assert two.ask("take")
    assert time.monotonic() - started > TIMES.expire
    two.kill()


def test_a_holder_that_was_stopped_too_long_finds_that_it_lost(tmp_path: Path) -> None:
    one, two = (Other(_hold, tmp_path / "lock", node) for node in ("n1", "n2"))
    assert one.ask("take")
    assert one.ask("check") == "mine"
    one.kill(signal.SIGSTOP)
    assert two.ask("take")
    one.kill(signal.SIGCONT)
    assert "Another process has taken over" in str(one.ask("check"))
    assert two.ask("check") == "mine"
    one.kill(), two.kill()


def test_of_many_that_find_an_expired_lease_one_gets_it(tmp_path: Path) -> None:
    first = Other(_hold, tmp_path / "lock", "n0")
    assert first.ask("take")
    first.kill()
    others = [Other(_hold, tmp_path / "lock", f"n{number}") for number in range(1, 7)]
    for other in others:
        other._pipe.send("take")
    taken = [other._pipe.recv() for other in others]
    assert sum(taken) == 1
    assert others[taken.index(True)].ask("check") == "mine"
    for other in others:
        other.kill()


def test_writers_of_a_store_without_flock(tmp_path: Path) -> None:
    one, two, three = (Other(_write, tmp_path) for _ in range(3))
    assert one.ask("open") == "done"
    one.kill()  # on this machine: nothing is waited for
    started = time.monotonic()
    assert two.ask("open") == "done"
    assert time.monotonic() - started < 3
    assert two.ask("write") == "done"
    assert three.ask("open") == "done"
    assert three.ask("write") == "done"
    assert [path.name for path in sorted(tmp_path.glob("shard-*.json"))] == [
        "shard-a-00000.json",
        "shard-a-00001.json",
    ]
    three.kill(), two.kill()
