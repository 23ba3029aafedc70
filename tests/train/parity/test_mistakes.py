"""The classic mistakes in an export: found before vLLM starts, and visible where vLLM serves them."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from data.target.spec import TargetSpec
from tests.data.capture.vllm.targets import KV_CACHE_BYTES
from tests.runs.forked import ROOT
from tests.train.parity.engines import EngineResults, K, decode_job, run_together
from tests.train.parity.mutations import MUTATIONS, mutate
from tests.train.parity.parity_cases import require_export, target_path
from train.drafter.published import validate_export
from train.evaluation.parity import Comparison, check_case

pytestmark = pytest.mark.timeout(7200)
# Served in every test run, the others with --full: wrong inputs, a wrong recursion, wrong tokens.
CORE = ("layer ids off by one", "pre-norm state fed back", "d2t as absolute ids")
CASE = "eagle31_llama3_rope"  # pruned, with every norm, and RoPE scaled: most mistakes can be made in it
WINDOW_CASE = "eagle3_yarn_window_pruned_norm_before_four_aux"


def case_of(mistake: str) -> str:
    """Return the case in whose export a mistake is made."""
    return WINDOW_CASE if mistake == "sliding window dropped" else CASE


@pytest.fixture(scope="module")
def served(full: bool) -> Sequence[str]:
    """The mistakes that vLLM serves."""
    return tuple(MUTATIONS) if full else CORE


@pytest.fixture(scope="module")
def engines(
    served: Sequence[str],
    trained: Path,
    vllm_python: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> EngineResults:
    """An engine for each mistake; a mistake's failure is its own."""
    scratch = tmp_path_factory.mktemp("mistakes")
    jobs = []
    for name in served:
        export = require_export(case_of(name), trained)
        mutated = mutate(export, scratch / name.replace(" ", "_"), MUTATIONS[name][0])
        jobs.append(decode_job(name, case_of(name), mutated, trained))
    return EngineResults(trained, run_together(jobs, vllm_python, scratch / "vllm.log"))


@pytest.fixture(scope="module")
def found(served: Sequence[str], engines: EngineResults) -> dict[str, Comparison | str]:
    """Compare each mistake's drafts with what was trained; a string is vLLM's own refusal."""
    compared: dict[str, Comparison | str] = {}
    for name in served:
        error, case = engines.results[name].error, case_of(name)
        reference = engines.reference(case, require_export(case, engines.trained))
        compared[name] = error or check_case(reference, engines.served(name), None, K)
    return compared


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_classic_mistake_is_named_before_vllm_starts(name: str, trained: Path, tmp_path: Path) -> None:
    mutation, word = MUTATIONS[name]
    mutated = mutate(require_export(case_of(name), trained), tmp_path / "export", mutation)
    findings = validate_export(mutated, TargetSpec(str(target_path(case_of(name), trained))))
    assert any(word in finding.field for finding in findings), findings


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_classic_mistake_shows_in_vllm(
    name: str, served: Sequence[str], request: pytest.FixtureRequest
) -> None:
    if name not in served:
        pytest.skip("part of scripts/test --full")
    comparison = request.getfixturevalue("found")[name]
    assert isinstance(comparison, str) or not comparison.passed


def test_check_serving_passes_a_good_export(trained: Path, vllm_python: Path, tmp_path: Path) -> None:
    export = require_export(CASE, trained)
    few = ("--num-prompts", "6", "--max-new-tokens", "48")
    done = check_serving(export, target_path(CASE, trained), vllm_python, tmp_path / "out.json", *few)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "verdict: vLLM serves what was trained" in done.stdout


def test_check_serving_names_a_mistake_and_starts_nothing(
    trained: Path, vllm_python: Path, tmp_path: Path
) -> None:
    mutation, word = MUTATIONS["pre-norm state fed back"]
    mutated = mutate(require_export(CASE, trained), tmp_path / "export", mutation)
    done = check_serving(mutated, target_path(CASE, trained), vllm_python, tmp_path / "out.json")
    assert done.returncode == 1
    assert word in done.stdout
    assert "vLLM was not started" in done.stdout


def test_a_bfloat16_engine_accepts_as_much(
    trained: Path, vllm_python: Path, tmp_path: Path, full: bool
) -> None:
    if not full:
        pytest.skip("part of scripts/test --full")
    name = "eagle3_norm_before_full_vocab_two_aux_bf16"
    export, target = require_export(name, trained), target_path(name, trained)
    done = check_serving(export, target, vllm_python, tmp_path / "out.json", "--dtype", "bfloat16")
    assert done.returncode == 0, done.stdout + done.stderr


def check_serving(
    export: Path, target: Path, python: Path, out: Path, *arguments: str
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "scripts/check_serving", str(export), "--target", str(target)]
    return subprocess.run(
        [
            *command,
            "--json",
            str(out),
            "--engine-args",
            f"kv_cache_memory_bytes={KV_CACHE_BYTES}",
            *arguments,
        ],
        cwd=ROOT,
        env=os.environ | {"EAGLE31_VLLM_PYTHON": str(python)},
        capture_output=True,
        text=True,
        timeout=600,
    )
