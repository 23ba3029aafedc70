"""Arguments that check_serving and bench/serving refuse, and their exit status."""

import json
import runpy
import sys
from pathlib import Path

import pytest

from eagle31.export.rules import Finding
from train.drafter import published

SCRIPTS = Path(__file__).parents[3] / "scripts"


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture):
    """Return a function that runs a script in this process and returns its exit status, stdout and stderr."""
    monkeypatch.setattr(sys, "path", list(sys.path))  # the script puts the repository's root there
    monkeypatch.delenv("EAGLE31_VLLM_PYTHON", raising=False)
    monkeypatch.setenv("EAGLE31_VLLM_ENV", str(tmp_path / "no-vllm"))

    def run_script(name: str, *arguments: object) -> tuple[object, str, str]:
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        with pytest.raises(SystemExit) as exited:
            runpy.run_path(str(SCRIPTS / name), run_name="__main__")
        captured = capsys.readouterr()
        return exited.value.code, captured.out, captured.err

    return run_script


@pytest.fixture
def export(tmp_path: Path) -> Path:
    (tmp_path / "export").mkdir()
    (tmp_path / "export" / "config.json").write_text(json.dumps({"architectures": ["Some"]}))
    return tmp_path / "export"


@pytest.mark.parametrize("script", ["check_serving", "bench/serving"])
def test_invalid_input_is_refused_before_anything_is_read(
    run, export: Path, tmp_path: Path, script: str
) -> None:
    target = ("--target", tmp_path / "target")
    (tmp_path / "empty").mkdir()
    cases = [
        ((tmp_path / "none", *target), "export="),
        ((tmp_path / "empty", *target), "config.json="),
        ((export, *target, "-k", 0), "-k=0: It must be at least 1."),
        ((export, *target, "--max-new-tokens", 0), "--max-new-tokens=0"),
        ((export, *target, "--num-prompts", 0), "--num-prompts=0"),
        ((export, *target), "run scripts/setup/vllm"),
    ]
    for arguments, message in cases:
        status, _, error = run(script, *arguments)
        assert (status, error.startswith("error: ")) == (2, True), arguments
        assert message in error


def test_benchmark_needs_users_and_rounds(run, export: Path, tmp_path: Path) -> None:
    shared = (export, "--target", tmp_path)
    assert "--concurrency=0" in run("bench/serving", *shared, "--concurrency", 4, 0)[2]
    assert "--rounds=0" in run("bench/serving", *shared, "--rounds", 0)[2]


def test_unsound_export_ends_before_an_engine_starts(
    run, export: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finding = Finding("fc_norm", "false", "true", "Export again.")
    monkeypatch.setattr(published, "validate_export", lambda directory, spec: [finding])
    monkeypatch.setenv("EAGLE31_VLLM_PYTHON", sys.executable)
    arguments = ("check_serving", export, "--target", tmp_path / "none")
    status, out, _ = run(*arguments)
    assert status == 1
    assert "fc_norm: found false, expected true" in out
    assert "vLLM was not started" in out
