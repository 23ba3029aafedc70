"""What check_serving and bench/serving refuse, and their exit status."""

import json
from pathlib import Path

import pytest

from tests.runs.here import run_command


@pytest.fixture
def export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("EAGLE31_VLLM_PYTHON", raising=False)
    monkeypatch.setenv("EAGLE31_VLLM_ENV", str(tmp_path / "no-vllm"))
    (tmp_path / "export").mkdir()
    (tmp_path / "export" / "config.json").write_text(json.dumps({"architectures": ["Some"]}))
    return tmp_path / "export"


@pytest.mark.parametrize("script", ["scripts/check_serving", "scripts/bench/serving"])
def test_invalid_input_is_refused_before_anything_is_read(export: Path, tmp_path: Path, script: str) -> None:
    target = ("--target", tmp_path / "target")
    cases = [
        ((tmp_path / "none", *target), "such as the export/ of a run"),
        ((export, *target, "-k", 0), "-k=0: "),
        ((export, *target), "run scripts/setup/vllm"),
    ]
    if script.endswith("bench/serving"):
        cases.append(((export, *target, "--concurrency", 4, 0), "--concurrency=0"))
    for arguments, message in cases:
        done = run_command(script, *arguments)
        assert (done.status, done.err.startswith("error: ")) == (2, True), arguments
        assert message in done.err


def test_a_target_that_vllm_does_not_serve_is_refused_before_any_weight_is_read(
    export: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "target").mkdir()
    config = {"model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"]}
    (tmp_path / "target" / "config.json").write_text(json.dumps(config))
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexit 3\n")  # as vLLM answers for it
    python.chmod(0o755)
    monkeypatch.setenv("EAGLE31_VLLM_PYTHON", str(python))
    done = run_command("scripts/check_serving", export, "--target", tmp_path / "target")
    assert done.status == 2
    assert "does not serve Gemma3ForCausalLM with EAGLE 3" in done.err
    assert "--engine-args model_impl=transformers" in done.err
