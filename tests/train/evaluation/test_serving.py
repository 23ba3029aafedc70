import stat
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from data.capture.vllm.environment import SETUP, find_python
from data.target.spec import TargetSpec
from eagle31.errors import UserError
from train.evaluation import serving_worker
from train.evaluation.serving import (
    WORKER,
    DecodeJob,
    EngineFailure,
    EngineSpec,
    JobResult,
    run_job,
    run_jobs,
)

FAKE = """#!{python}
import json, os, sys
from pathlib import Path
isolated, worker, jobs, results = sys.argv[1:]
print("engine says hello", os.environ.get("PYTHONPATH"), flush=True)
for index, job in enumerate(json.loads(Path(jobs).read_text())):
    if job["name"] == "dies":
        os._exit(3)
    drafts = [[{{"position": 1, "token_ids": [4, 5], "num_accepted": 1}}] for _ in job["prompts"]]
    counters = {{"num_drafts": 1, "num_accepted": 1, "accepted_per_position": [1, 0]}}
    result = {{"completions": job["prompts"], "drafts": drafts, "counters": counters}}
    result |= {{"model_runner": "V1", "vllm_version": "0"}}
    if job["name"] == "fails":
        result = {{"error": "ValueError: no such tensor", "traceback": "  File loader.py"}}
    (Path(results) / f"{{index}}.json").write_text(json.dumps(result))
"""


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """A Python that takes the worker's arguments and writes results like it."""
    path = tmp_path / "bin" / "python"
    path.parent.mkdir()
    path.write_text(FAKE.format(python=sys.executable))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def job(name: str) -> DecodeJob:
    return DecodeJob(name, EngineSpec(TargetSpec("target")), [[1, 2]], 8)


def test_results_come_back_typed_and_a_failed_engine_does_not_end_the_rest(
    tmp_path: Path, python: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "ours")
    log = tmp_path / "logs" / "vllm.log"
    first, failed, last = run_jobs([job("a"), job("fails"), job("b")], python, log)
    assert isinstance(first, JobResult)
    assert first.served.completions == [[1, 2]]
    assert first.served.drafts[0][0].token_ids == [4, 5]
    assert first.counters["accepted_per_position"] == [1, 0]
    assert last == first == run_job(job("c"), python, log)
    assert log.read_text() == "engine says hello None\n"
    assert str(log) in str(failed)
    with pytest.raises(EngineFailure, match=r"fails.*no such tensor\n *\|   File loader.py"):
        run_job(job("fails"), python, log)


def test_a_process_that_dies_is_an_error_with_the_end_of_its_log(tmp_path: Path, python: Path) -> None:
    with pytest.raises(EngineFailure, match=r"status 3[^$]*\| engine says hello"):
        run_jobs([job("a"), job("dies")], python, tmp_path / "log")


def test_the_worker_needs_nothing_of_ours(tmp_path: Path) -> None:
    """With a Python without vLLM, the worker fails only when it imports vLLM."""
    with pytest.raises(EngineFailure, match="No module named 'vllm'"):
        run_job(job("a"), Path(sys.executable), tmp_path / "log")
    imported = [line.split()[1] for line in WORKER.read_text().splitlines() if line.startswith("from ")]
    assert not {name.split(".")[0] for name in imported} & {"eagle31", "data", "train", "scripts"}


class FakeEngine:
    """An engine that writes one token of each request in its first step, and then two of five in each."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.running: dict[str, int] = {}
        self.most = 0

    def add_request(self, name: str, prompt: dict[str, Any], _: Any) -> None:
        self.asked.append(prompt["prompt_token_ids"][0])
        self.running[name] = -1
        self.most = max(self.most, len(self.running))

    def step(self) -> list[Any]:
        outputs = []
        for name, length in self.running.items():
            self.running[name] = length + 2
            written = SimpleNamespace(token_ids=[0] * (length + 2))
            outputs.append(SimpleNamespace(request_id=name, outputs=[written], finished=length + 2 == 5))
        self.running = {name: length for name, length in self.running.items() if length < 5}
        return outputs


def test_users_send_a_prompt_when_the_last_one_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving_worker, "sampling_params", lambda *_, **__: None)
    engine = FakeEngine()
    found = serving_worker.closed_loop(
        SimpleNamespace(llm_engine=engine), {"prompts": [[10], [11], [12]]}, 2, range(4, 9)
    )
    assert (engine.most, engine.asked) == (2, [11, 12, 10, 11, 12])
    assert found["prompts"] == [1, 2, 0, 1, 2]
    assert found["num_tokens"] == [5] * 5
    assert min(found["seconds"]) > 0
    assert (found["num_forwards"], found["num_decoded"]) == (5 * 2, 5 * 4)


def test_a_missing_environment_names_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EAGLE31_VLLM_PYTHON", raising=False)
    monkeypatch.setenv("EAGLE31_VLLM_ENV", str(tmp_path / "vllm"))
    with pytest.raises(UserError, match=r"EAGLE31_VLLM_ENV=.*run scripts/setup/vllm"):
        find_python()
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / ".eagle31-stamp").touch()
    assert find_python() == tmp_path / "vllm" / "bin" / "python"
    monkeypatch.setenv("EAGLE31_VLLM_PYTHON", str(tmp_path / "none"))
    with pytest.raises(UserError, match=r"EAGLE31_VLLM_PYTHON=.*does not exist"):
        find_python()
    monkeypatch.setenv("EAGLE31_VLLM_PYTHON", sys.executable)
    assert find_python() == Path(sys.executable)


def test_setup_leaves_a_directory_of_others_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EAGLE31_VLLM_PYTHON", raising=False)
    monkeypatch.setenv("EAGLE31_VLLM_ENV", str(tmp_path))
    (tmp_path / "thesis.tex").touch()
    done = subprocess.run([str(SETUP)], capture_output=True, text=True)
    assert done.returncode == 1
    assert "The directory has other content" in done.stderr
    assert (tmp_path / "thesis.tex").exists()
