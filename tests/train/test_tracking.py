import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from eagle31.errors import UserError
from train import tracking
from train.tracking import Tracker, check_wandb, flatten_metrics, open_tracker, wandb_mode

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
    with tracker(directory, is_main=False) as other:
        log_steps(other, 1, 2)
    assert list(directory.iterdir()) == []


def test_a_resumed_run_continues_its_wandb_run_and_no_file_has_a_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("HF_TOKEN", SECRET)
    monkeypatch.setattr("sys.argv", ["train/main.py", f"hub.token={SECRET}"])
    for resume_step in (0, 3):
        with tracker(tmp_path, resume_step) as opened:
            log_steps(opened, resume_step + 1, resume_step + 5)
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
    with tracker(tmp_path):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    assert wandb_mode() == "online"
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert wandb_mode() == "disabled"


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        ({"WANDB_MODE": "banana"}, "WANDB_MODE=banana: W&B refuses it: .*'offline'"),
        ({"WANDB_MODE": "offline", "WANDB_PROJECT": "a/b"}, "WANDB_PROJECT=a/b: W&B refuses it: "),
        ({"WANDB_MODE": "online"}, "WANDB_MODE=online: There is no key"),
        ({"NETRC": "{directory}/malformed"}, "NETRC=.*/malformed: W&B reads its key there, and .*line 1"),
    ],
)
def test_what_wandb_would_refuse_after_capture_is_refused_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], named: str
) -> None:
    (tmp_path / "malformed").write_text("machine")
    for name, value in variables.items():
        monkeypatch.setenv(name, value.format(directory=tmp_path))
    with pytest.raises(UserError, match=named):
        check_wandb()


def test_training_goes_on_offline_where_the_server_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("WANDB_INIT_TIMEOUT", "0.1")
    with tracker(tmp_path) as opened:
        log_steps(opened, 1, 2)
    [sent] = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    assert b"train/depth_1/loss" in sent.read_bytes()
    assert f"later: wandb sync {sent.parent}" in capsys.readouterr().out


class Server(BaseHTTPRequestHandler):
    """W&B's, which answers until a run has begun, and then not any more."""

    begun = False

    def do_POST(self) -> None:
        text = self.rfile.read(int(self.headers["Content-Length"])).decode(errors="replace")
        project = {"id": "p", "name": "eagle31", "entity": {"id": "e", "name": "me"}}
        bucket = {"id": "b", "name": "run", "displayName": "run", "config": "{}", "project": project}
        content = json.dumps({"data": {"upsertBucket": {"bucket": bucket, "inserted": True}}}).encode()
        self.send_response(503 if Server.begun else 200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)
        Server.begun |= "upsertBucket" in text

    def log_message(self, *_: object) -> None: ...


def test_a_training_does_not_wait_for_a_server_that_answers_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(tracking, "FINISH_SECONDS", 1.0)
    with ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{server.server_port}")
        with tracker(tmp_path) as opened:
            log_steps(opened, 1, 2)
        server.shutdown()
    [sent] = tmp_path.glob("wandb/run-*/run-*.wandb")
    assert b"train/depth_1/loss" in sent.read_bytes()
    assert "W&B gets nothing more, metrics.jsonl has it all: TimeoutError" in capsys.readouterr().out


class Run:
    """A run of W&B whose process is gone where it is `lost`."""

    def __init__(self, *, lost: bool) -> None:
        self.lost, self.exit_codes = lost, []

    def log(self, _: dict[str, float]) -> None:
        if self.lost:
            raise ConnectionResetError("Connection lost")

    def finish(self, exit_code: int) -> None:
        self.exit_codes.append(exit_code)


def test_an_error_of_wandb_ends_no_training(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    run = Run(lost=True)
    with Tracker(tmp_path / "metrics.jsonl", run) as opened:
        log_steps(opened, 1, 3)
    assert steps(tmp_path) == [1, 2, 3]
    assert capsys.readouterr().out.count("W&B gets nothing more") == 1
    assert run.exit_codes == []


def test_wandb_is_told_how_a_training_ends(tmp_path: Path) -> None:
    run = Run(lost=False)
    with pytest.raises(ValueError, match="diverged"), Tracker(None, run):
        raise ValueError("diverged")
    with Tracker(None, run):
        pass
    assert run.exit_codes == [1, 0]


def test_flatten_names_depths_and_draft_lengths() -> None:
    line = {"kind": "train", "step": 3, "depth": [{"a": 1.0}], "lengths": {"4": 2.5}, "name": "x"}
    assert flatten_metrics(line) == {"train/depth_0/a": 1.0, "train/lengths/4": 2.5}
