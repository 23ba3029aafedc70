"""With --full: the fuzzing of every reader that coverage guides, and inputs of their largest sizes."""

import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from data.embedded.target import EmbeddedTarget
from tests.fuzz.test_readers import NAMES
from tests.train.torchrun import environment

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 10  # for each reader
MEMORY_BYTES = 12 << 30  # of addresses, of which libraries take several GB
PEAK_BYTES = 4 << 30
PAIR = '{"role":"user","content":"a"},{"role":"assistant","content":"b"}'


@pytest.fixture
def full(request: pytest.FixtureRequest) -> None:
    if not request.config.getoption("--full"):
        pytest.skip("it takes minutes: scripts/test --full")


@pytest.fixture
def atheris(full: None, tmp_path: Path) -> Path:
    """The directory in which atheris is installed for this Python, apart from the environment."""
    requirements = Path(__file__).with_name("requirements.txt")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--require-hashes"]
    command += ["--target", str(tmp_path / "atheris"), "-r", str(requirements)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if done.returncode:
        pytest.skip(f"atheris cannot be installed: {done.stderr[-500:]}")
    return tmp_path / "atheris"


@pytest.mark.timeout(3600)
def test_nothing_breaks_a_reader_where_coverage_guides_the_fuzzing(atheris: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("fuzz.py")), str(SECONDS)],
        cwd=tmp_path,
        env=environment() | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(atheris)])},
        capture_output=True,
        text=True,
        timeout=3500,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    counts = {
        line.split()[0]: int(line.split()[1]) for line in done.stdout.splitlines() if "executions" in line
    }
    assert counts.keys() == set(NAMES)
    assert min(counts.values()) > 1, counts


def long_answer() -> str:
    content = "it is four " * (10**8 // 11)
    turns = [{"role": "user", "content": "what"}, {"role": "assistant", "content": content}]
    return json.dumps({"messages": turns})


def many_turns() -> str:
    return '{"messages":[' + ",".join([PAIR] * 5_000_000) + "]}"


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (long_answer, "more than the 8,388,608 that are tokenized"),
        (many_turns, "The line is longer than 134,217,728 bytes"),
    ],
)
@pytest.mark.timeout(900)
def test_a_huge_conversation_is_named_and_takes_little_memory(
    full: None,
    small_target: EmbeddedTarget,
    tmp_path: Path,
    line: Callable[[], str],
    says: str,
) -> None:
    (tmp_path / "huge.jsonl").write_text(line() + "\n")
    command = [sys.executable, str(ROOT / "scripts" / "inspect_data"), "huge.jsonl"]
    process = subprocess.Popen(
        [*command, "--tokenizer", str(small_target.model)],
        cwd=tmp_path,
        env=environment(),
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES)),
    )
    assert process.stderr is not None
    said = process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 2, said
    assert says in said
    assert 1024 * usage.ru_maxrss < PEAK_BYTES
