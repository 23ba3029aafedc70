import json
import signal
import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.train.torchrun import ROOT, preloaded_python
from train.config.training import TrackingMode
from train.tracking.tracker import Tracker, flatten_metrics, has_wandb_key, open_tracker, without_secrets
from train.tracking.wandb_files import history

SECRET = "hf_" + "a1B2" * 8


@pytest.fixture(autouse=True)
def _no_wandb_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.delenv("WANDB_BASE_URL", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    for name in ("WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "home"))


def tracker(directory: Path, mode: TrackingMode, resume_step: int = 0, **more: Any) -> Tracker:
    fields: dict[str, Any] = {"config": {}, "is_main": True} | more
    metrics_path = directory / "metrics.jsonl"
    return open_tracker(
        mode,
        project="eagle31",
        name="test",
        directory=directory,
        metrics_path=metrics_path,
        resume_step=resume_step,
        **fields,
    )


def steps(directory: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (directory / "metrics.jsonl").read_text().splitlines()]


def log_steps(opened: Tracker, first: int, last: int, shift: float = 0.0) -> None:
    for step in range(first, last + 1):
        depths = [{"loss": 1.0}, {"loss": 2.0}]
        opened.log({"kind": "train", "step": step, "loss": shift + 1 / step, "depth": depths})


def test_resume_reads_as_one_uninterrupted_run(tmp_path: Path) -> None:
    log_steps(tracker(tmp_path, TrackingMode.disabled), 1, 7)
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"kind": "train", "st')  # killed while writing
    log_steps(tracker(tmp_path, TrackingMode.disabled, resume_step=5), 6, 8)
    assert steps(tmp_path) == [1, 2, 3, 4, 5, 6, 7, 8]


def test_start_from_step_zero_drops_the_earlier_run(tmp_path: Path) -> None:
    first = tracker(tmp_path, TrackingMode.disabled)
    first.log({"kind": "validation", "step": 0})
    second = tracker(tmp_path, TrackingMode.disabled)
    second.log({"kind": "validation", "step": 0})
    assert steps(tmp_path) == [0]


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    directory.mkdir()
    other = tracker(directory, TrackingMode.offline, is_main=False)
    log_steps(other, 1, 2)
    other.close()
    assert list(directory.iterdir()) == []


def test_offline_wandb_run_continues_and_stores_no_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setattr("sys.argv", ["train/main.py", f"hub.token={SECRET}"])
    config = {"hub": {"token": SECRET}, "overrides": [f"hub.token={SECRET}"], "lr": 1e-4}
    run_ids = []
    for resume_step in (0, 3):
        opened = tracker(tmp_path, TrackingMode.auto, resume_step, config=config)
        log_steps(opened, resume_step + 1, resume_step + 3)
        opened.commit()
        opened.close()
        run_ids.append(json.loads((tmp_path / "wandb_run.json").read_text())["id"])

    run_files = list(tmp_path.glob("wandb/offline-run-*/*.wandb"))
    assert len(run_files) == 2
    assert {path.name for path in run_files} == {f"run-{run_ids[0]}.wandb"}
    assert run_ids[0] == run_ids[1]
    assert all(b"train/depth_1/loss" in path.read_bytes() for path in run_files)
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert not [path for path in written if SECRET.encode() in path.read_bytes()]
    assert steps(tmp_path) == [1, 2, 3, 4, 5, 6]
    assert "wandb" not in "".join(capfd.readouterr())


def test_a_damaged_file_of_wandb_begins_a_new_run(tmp_path: Path) -> None:
    first = tracker(tmp_path, TrackingMode.offline)
    log_steps(first, 1, 2)
    first.commit()
    first.close()
    [file] = tmp_path.glob("wandb/offline-run-*/*.wandb")
    file.write_bytes(b"no file of W&B")
    second = tracker(tmp_path, TrackingMode.offline, resume_step=2)
    log_steps(second, 3, 3)
    second.commit()
    second.close()
    file.unlink()
    assert [step for step, _ in rows(tmp_path)] == [1, 2, 3]


KILLED = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from tests.train.tracking.test_tracker import log_steps, tracker
from train.config.training import TrackingMode
opened = tracker(Path(sys.argv[2]), TrackingMode.offline)
log_steps(opened, 1, 5)
opened.commit()
log_steps(opened, 6, 7)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_wandb_has_each_step_once_whenever_a_run_is_killed(tmp_path: Path) -> None:
    """The first run is killed after step 7, with a checkpoint of step 5."""
    killed = subprocess.run([preloaded_python(), "-c", KILLED, str(ROOT), str(tmp_path)], timeout=120)
    assert killed.returncode == -signal.SIGKILL
    opened = tracker(tmp_path, TrackingMode.offline, resume_step=5)
    log_steps(opened, 6, 8, shift=10.0)
    opened.commit()
    log_steps(opened, 9, 9)
    opened.close()
    assert rows(tmp_path) == [(step, 1 / step) for step in range(1, 6)] + [
        (step, 10 + 1 / step) for step in range(6, 9)
    ]
    # The checkpoint of step 8 is damaged, and the run resumes from an older one: W&B cannot go back.
    first = run_id(tmp_path)
    opened = tracker(tmp_path, TrackingMode.offline, resume_step=5)
    log_steps(opened, 6, 6, shift=20.0)
    opened.commit()
    opened.close()
    assert run_id(tmp_path) != first
    assert rows(tmp_path) == [(step, 1 / step) for step in range(1, 6)] + [(6, 20 + 1 / 6)]


def run_id(directory: Path) -> str:
    return json.loads((directory / "wandb_run.json").read_text())["id"]


def rows(directory: Path) -> list[tuple[int, float]]:
    """The steps and losses of the current W&B run, in the order in which `wandb sync` sends them."""
    found = sorted(directory.glob(f"wandb/offline-run-*-{run_id(directory)}/*.wandb"))
    return [(row["_step"], row["train/loss"]) for path in found for row in history(path)]


def test_key_is_found_in_the_environment_or_netrc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not has_wandb_key()
    netrc = tmp_path / "netrc"
    netrc.write_text("machine example.org\n  login user\n  password secret\n")
    netrc.chmod(stat.S_IRUSR | stat.S_IWUSR)
    assert not has_wandb_key()
    netrc.write_text("machine api.wandb.ai\n  login user\n  password secret\n")
    assert has_wandb_key()
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.org")
    assert not has_wandb_key()
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    assert has_wandb_key()


def test_flatten_names_depths_and_draft_lengths() -> None:
    train = {"kind": "train", "step": 3, "loss": 1.5, "depth": [{"loss": 1.0}, {"loss": 2.0}]}
    assert flatten_metrics(train) == {"train/loss": 1.5, "train/depth_0/loss": 1.0, "train/depth_1/loss": 2.0}
    validation = {"kind": "validation", "step": 3, "acceptance_length": {"1": 1.5, "4": 2.5}}
    assert flatten_metrics(validation) == {
        "validation/acceptance_length/1": 1.5,
        "validation/acceptance_length/4": 2.5,
    }


def test_secrets_are_removed_and_token_counts_kept() -> None:
    config = {
        "row_tokens": 2048,
        "hub": {"token": "x", "repo": "owner/name"},
        "wandb_api_key": "x",
        "urls": ["https://user:word@example.org/model", "https://example.org/model"],
    }
    assert without_secrets(config) == {
        "row_tokens": 2048,
        "hub": {"repo": "owner/name"},
        "urls": ["(removed)", "https://example.org/model"],
    }
