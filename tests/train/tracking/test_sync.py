"""What W&B's client sends to a server after kills: online, and with `wandb sync`."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.train.torchrun import ROOT, preloaded_python
from tests.train.tracking.test_tracker import log_steps, run_id, tracker
from tests.train.tracking.wandb_server import Recorded, recording_server
from train.config.training import TrackingMode

# Logs steps, of which the last two are not committed, and is killed.
KILLED = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from tests.train.tracking.test_tracker import log_steps, tracker
from train.config.training import TrackingMode
first, last = map(int, sys.argv[4:])
opened = tracker(Path(sys.argv[2]), TrackingMode(sys.argv[3]), first - 1)
log_steps(opened, first, last)
opened.commit()
log_steps(opened, last + 1, last + 2)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorded]:
    with recording_server() as recorded:
        monkeypatch.setenv("WANDB_BASE_URL", recorded.url)
        monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
        for name in ("WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
            monkeypatch.setenv(name, str(tmp_path / "home"))
        yield recorded


def run_killed(directory: Path, mode: TrackingMode, first: int, last: int) -> None:
    command = [preloaded_python(), "-c", KILLED, ROOT, directory, mode.value, first, last]
    done = subprocess.run(list(map(str, command)), timeout=120)
    assert done.returncode == -signal.SIGKILL


def run_to_its_end(directory: Path, mode: TrackingMode, first: int, last: int) -> None:
    opened = tracker(directory, mode, first - 1)
    log_steps(opened, first, last)
    opened.commit()
    opened.close()


def assert_each_step_once(server: Recorded, name: str, last: int) -> None:
    assert [row["_step"] for row in server.rows[name]] == list(range(1, last + 1))
    assert [row["train/loss"] for row in server.rows[name]] == [1 / step for step in range(1, last + 1)]
    assert not any(server.gaps)


def test_an_online_run_that_is_killed_sends_each_step_once(server: Recorded, tmp_path: Path) -> None:
    """What the server lacks of a killed run is sent by the next one."""
    run_to_its_end(tmp_path, TrackingMode.online, 1, 3)
    run_killed(tmp_path, TrackingMode.online, 4, 6)
    run_killed(tmp_path, TrackingMode.online, 7, 8)
    run_to_its_end(tmp_path, TrackingMode.online, 9, 10)
    first = run_id(tmp_path)
    assert_each_step_once(server, first, 10)
    # The newest checkpoints are damaged: W&B cannot go back.
    run_to_its_end(tmp_path, TrackingMode.online, 7, 7)
    assert_each_step_once(server, run_id(tmp_path), 7)
    assert_each_step_once(server, first, 10)


def test_offline_runs_that_were_killed_are_synchronized_with_each_step_once(
    server: Recorded, tmp_path: Path
) -> None:
    offline = TrackingMode.offline
    run_to_its_end(tmp_path, offline, 1, 3)
    [first] = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    # As after a loss of power: the end of a file is missing, and another file has a header alone.
    os.truncate(first, first.stat().st_size // 2)
    empty = first.parent.with_name(first.parent.name.replace("offline-run-2", "offline-run-1"))
    shutil.copytree(first.parent, empty)
    os.truncate(empty / first.name, 7)
    run_killed(tmp_path, offline, 4, 6)
    run_to_its_end(tmp_path, offline, 7, 10)
    done = subprocess.run(
        [sys.executable, "-m", "wandb", "sync", "--yes"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "ERROR" not in done.stderr
    assert_each_step_once(server, run_id(tmp_path), 10)
