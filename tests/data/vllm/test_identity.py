"""The identity of a process."""

import os
import subprocess
import sys

import pytest

from data.vllm.server_info import Identity


def test_a_process_has_ended_once_it_was_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        identity = Identity.of(process.pid)
        assert Identity.from_json(identity.to_json()) == identity
        assert not identity.has_ended
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert identity.has_ended, "it is not reaped"
    assert identity.has_ended


def test_another_process_with_the_same_id_or_another_machine_tells_nothing() -> None:
    this = Identity.of(os.getpid())
    assert Identity(this.machine, f"{os.getpid()}:1").has_ended
    assert not Identity(f"{this.machine}0", f"{os.getpid()}:1").has_ended


@pytest.mark.parametrize("raw", [None, [], {}, {"machine": "a"}, {"machine": "a", "process": "x:1"}])
def test_what_is_no_identity_is_none(raw: object) -> None:
    assert Identity.from_json(raw) is None
