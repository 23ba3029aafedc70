import json
from pathlib import Path

import pytest

from train.tracking import Tracker, flatten_metrics, open_tracker, wandb_mode

SECRET = "hf_" + "a1B2" * 8


@pytest.fixture(autouse=True)
def _no_wandb_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_API_KEY", "WANDB_BASE_URL", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    for name in ("WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "home"))


def tracker(directory: Path, resume_step: int = 0, *, is_main: bool = True) -> Tracker:
    return open_tracker(
        name="test",
        config={"lr": 1e-4},
        directory=directory,
        resume_step=resume_step,
        is_main=is_main,
    )


def log_steps(opened: Tracker, first: int, last: int) -> None:
    for step in range(first, last + 1):
        opened.log({"kind": "train", "step": step, "loss": 1 / step, "depth": [{"loss": 1.0}, {"loss": 2.0}]})


def steps(directory: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (directory / "metrics.jsonl").read_text().splitlines()]


def test_resume_reads_as_one_uninterrupted_run(tmp_path: Path) -> None:
    log_steps(tracker(tmp_path), 1, 7)
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"kind": "train", "st')  # killed while writing
    log_steps(tracker(tmp_path, resume_step=5), 6, 8)
    assert steps(tmp_path) == [1, 2, 3, 4, 5, 6, 7, 8]
    log_steps(tracker(tmp_path), 1, 2)  # no checkpoint was left
    assert steps(tmp_path) == [1, 2]


def test_other_ranks_write_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    directory = tmp_path / "run"
    directory.mkdir()
    other = tracker(directory, is_main=False)
    log_steps(other, 1, 2)
    other.close()
    assert list(directory.iterdir()) == []


def test_a_resumed_run_continues_its_wandb_run_and_no_file_has_a_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("HF_TOKEN", SECRET)
    monkeypatch.setattr("sys.argv", ["train/main.py", f"hub.token={SECRET}"])
    for resume_step in (0, 3):
        opened = tracker(tmp_path, resume_step)
        log_steps(opened, resume_step + 1, resume_step + 5)
        opened.close()
    assert steps(tmp_path) == [1, 2, 3, 4, 5, 6, 7, 8]
    run_id = json.loads((tmp_path / "wandb_run.json").read_text())["id"]
    sent = list(tmp_path.glob(f"wandb/offline-run-*/run-{run_id}.wandb"))
    assert len(sent) == 2
    assert all(b"train/depth_1/loss" in path.read_bytes() for path in sent)
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert not [path for path in written if SECRET.encode() in path.read_bytes()]
    assert "wandb" not in "".join(capfd.readouterr())


def test_wandb_is_off_without_a_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert wandb_mode() == "disabled"
    tracker(tmp_path).close()
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    assert wandb_mode() == "online"
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert wandb_mode() == "disabled"


def test_flatten_names_depths_and_draft_lengths() -> None:
    line = {"kind": "train", "step": 3, "depth": [{"a": 1.0}], "lengths": {"4": 2.5}, "name": "x"}
    assert flatten_metrics(line) == {"train/depth_0/a": 1.0, "train/lengths/4": 2.5}
