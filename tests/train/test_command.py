"""How commands end. Each test runs a small command in a separate process."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from eagle31.errors import UserError
from tests.bad_input.faults import small_disk
from tests.runs.forked import ROOT
from tests.runs.here import run_command
from train import distributed
from train.command import set_thread_defaults

START = f"""
import os, sys
sys.path.insert(0, {str(ROOT)!r})
from train.command import prepare, run_command
prepare()
from eagle31.errors import UserError
class Failure(Exception):
    pass
"""


def run(body: str, *, before: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a command whose `main` has this body."""
    code = f"{START}{before}\ndef main():\n    {body}\nrun_command(main, failures=(Failure,))\n"
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "TORCHELASTIC"))
    }
    return subprocess.run(
        [sys.executable, "-c", code],
        env=kept | environment,
        capture_output=True,
        text=True,
        # A process that a shell started in the background ignores SIGINT, and so would its children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


@pytest.mark.parametrize(
    ("body", "status", "printed"),
    [
        ("return 1", 1, ""),
        ("raise UserError('a.b', 3, 'Give 4.')", 2, "error: a.b=3: Give 4.\n"),
        ("raise Failure('vLLM stopped')", 1, "error: vLLM stopped\n"),
        ("os.kill(os.getpid(), 2); import time; time.sleep(30)", 130, ""),
    ],
)
def test_every_end_has_its_status_and_its_message(body: str, status: int, printed: str) -> None:
    done = run(body)
    assert (done.returncode, done.stdout, done.stderr) == (status, "", printed)


def test_what_the_machine_refuses_is_a_message_with_the_file() -> None:
    done = run("raise OSError(28, 'written', '/full/x')")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: file=/full/x: No space left on device. Free some space")
    refused = run("raise OSError(13, 'written')")
    assert refused.returncode == 1
    assert "Traceback" in refused.stderr


def test_a_full_disk_is_named_where_the_error_names_no_file(tmp_path: Path) -> None:
    with small_disk(tmp_path, 1 << 16):
        (tmp_path / "file").write_bytes(bytes(1 << 16))
        done = run("raise OSError(28, 'written')", TMPDIR=str(tmp_path))
    assert done.stderr.startswith(f"error: file={tmp_path}: No space left on device. Free some space")


def test_the_end_of_the_ranks_does_not_replace_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distributed, "leave_ranks", lambda _: pytest.fail("it waits for the ranks"))
    (tmp_path / "file").touch()
    settings = ["target.model=a/b", "data.train=c/d", f"output_dir={tmp_path}/file/run"]
    outcome = run_command("train/main.py", "recipe=any_target", *settings)
    assert (outcome.status, outcome.err.startswith("error: output_dir=")) == (2, True)


def test_a_rank_that_waits_for_rank_0_from_the_start_watches_it(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Mock()
    calls.made_by_main.side_effect = UserError("rank 0", "lost", "It has ended.")
    for name in ("watch_ranks", "made_by_main"):
        monkeypatch.setattr(distributed, name, getattr(calls, name))
    assert run_command("train/main.py", "recipe=quickstart").err == "error: rank 0=lost: It has ended.\n"
    assert [call[0] for call in calls.mock_calls] == ["watch_ranks", "made_by_main"]


def test_a_missing_package_names_the_command_that_installs_it() -> None:
    done = run("pass", before="import a_package_that_is_missing")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert done.stderr.startswith(f"error: package=a_package_that_is_missing: {sys.executable} ")
    assert "scripts/quickstart" in done.stderr


@pytest.mark.parametrize(("rank", "printed"), [("0", "error: a.b=3: Give 4.\n"), ("1", "")])
def test_torchruns_table_gets_the_message_and_one_rank_of_a_node_prints_it(
    tmp_path: Path, rank: str, printed: str
) -> None:
    file = tmp_path / "error.json"
    body = "raise UserError('a.b', 3, 'Give 4.')"
    done = run(body, TORCHELASTIC_ERROR_FILE=str(file), RANK="3", LOCAL_RANK=rank)
    assert (done.returncode, done.stderr) == (2, printed)
    assert json.loads(file.read_text())["message"]["extraInfo"]["py_callstack"] == "error: a.b=3: Give 4."


def test_a_full_disk_of_torchrun_hides_no_message() -> None:
    done = run("raise UserError('a.b', 3, 'Give 4.')", TORCHELASTIC_ERROR_FILE="/dev/full")
    assert (done.returncode, done.stderr) == (2, "error: a.b=3: Give 4.\n")


@pytest.mark.parametrize(
    ("num_cores", "processes", "threads"), [(8, None, "8"), (2, "4", "1"), (96, "8", "12")]
)
def test_the_processes_of_a_node_share_its_cores(num_cores: int, processes: str | None, threads: str) -> None:
    environment = {} if processes is None else {"LOCAL_WORLD_SIZE": processes}
    set_thread_defaults(environment, num_cores, has_gpu=False)
    assert environment["OMP_NUM_THREADS"] == threads
    assert environment["DS_ACCELERATOR"] == "cpu"
    assert environment["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] == "8"


@pytest.mark.parametrize(
    ("given", "spins"),
    [({}, "1000"), ({"GOMP_SPINCOUNT": "5"}, "5"), ({"OMP_WAIT_POLICY": "active"}, None)],
)
def test_threads_spin_shortly_unless_the_user_decides(given: dict[str, str], spins: str | None) -> None:
    environment = dict(given)
    set_thread_defaults(environment, 2, has_gpu=False)
    assert environment.get("GOMP_SPINCOUNT") == spins
    assert environment["OMP_WAIT_POLICY"] == given.get("OMP_WAIT_POLICY", "passive")
