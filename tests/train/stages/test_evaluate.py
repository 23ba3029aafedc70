"""The evaluate stage with vLLM, compared with the same stage with transformers."""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from data.capture import hf
from data.embedded.target import EmbeddedTarget
from data.target.parts import load_target_parts
from data.target.spec import TargetSpec
from eagle31.export.read import load_export
from eagle31.json_files import read_json
from tests.train.small_run import RECIPE, arguments
from tests.train.torchrun import composed
from train.config.run import Stage
from train.config.target import TargetEngine
from train.context import RunContext
from train.distributed import World
from train.evaluation import vllm as vllm_evaluation
from train.evaluation.parity import compare_engine
from train.evaluation.serving import DecodeJob, JobResult, run_job
from train.pipeline import run_stage, run_stages, unfinished_stages
from train.stages.report import run_report

CPU = torch.device("cpu")


@dataclass(frozen=True)
class VllmRun:
    """A run that was evaluated in vLLM, with the jobs that vLLM got and their results."""

    directory: Path
    jobs: list[DecodeJob]
    results: list[JobResult]


def evaluations(directory: Path) -> list[dict[str, Any]]:
    """Return the evaluation with transformers, then the one with vLLM."""
    found = [read_json(path) for path in directory.glob("artifacts/evaluate-*/evaluation.json")]
    return sorted(found, key=lambda one: one["engine"].startswith("vLLM"))


@pytest.fixture(scope="module")
def in_vllm(
    small_target: EmbeddedTarget,
    finished: tuple[Path, str],
    vllm_python: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> VllmRun:
    """A finished run evaluated in vLLM."""
    found = VllmRun(tmp_path_factory.mktemp("in_vllm") / "run", [], [])
    shutil.copytree(finished[0], found.directory, symlinks=True)

    def kept(job: DecodeJob, python: Path, log: Path) -> JobResult:
        found.jobs.append(job)
        found.results.append(run_job(job, python, log))
        return found.results[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EAGLE31_VLLM_PYTHON", str(vllm_python))
        patch.setattr(vllm_evaluation, "run_job", kept)
        patch.setattr(hf, "load_target", lambda *_: pytest.fail("transformers loaded the target"))
        evaluate_in_vllm(small_target, found.directory)
    return found


def evaluate_in_vllm(target: EmbeddedTarget, directory: Path) -> None:
    """Evaluate a finished run in vLLM; its held-out completions are from transformers."""
    context = RunContext(composed(RECIPE, *arguments(target, directory)), World(rank=0, local_rank=0, size=1))
    run_stages(context)
    context.config.target.engine = TargetEngine.vllm
    unfinished_stages(context, [Stage.evaluate])
    run_stage(context, Stage.evaluate, unfinished=True)
    run_report(context)


def test_vllm_drafts_and_writes_what_was_trained(small_target: EmbeddedTarget, in_vllm: VllmRun) -> None:
    [export] = in_vllm.directory.glob("artifacts/export-*/checkpoint")
    spec, job = TargetSpec(str(small_target.model)), in_vllm.jobs[0]
    parts = load_target_parts(spec)
    loaded = load_export(export, CPU, torch.float32)
    served = in_vllm.results[0].served
    comparison = compare_engine(loaded, parts, spec, job.prompts, served, job.engine.k, torch.float32)
    assert comparison.failures == []
    assert comparison.agreement.num_compared == comparison.agreement.num_drafts > 20
    assert comparison.replayed == comparison.vllm
    assert comparison.vllm.num_accepted > 10


def test_vllm_gives_the_same_numbers_as_eagle31(in_vllm: VllmRun) -> None:
    hf, vllm = evaluations(in_vllm.directory)
    names = (
        *("num_drafts", "accepted_per_position", "num_tokens"),
        *("completions", "replay"),
    )
    assert {name: vllm["decoding"][name] for name in names} == {name: hf["decoding"][name] for name in names}
    for name in ("k", "num_prompts", "max_new_tokens", "trained", "untrained"):
        assert vllm[name] == hf[name]
    assert vllm["decoding"]["replay"]["num_identical"] > 20


def test_report_and_card_name_vllm_as_the_engine(in_vllm: VllmRun) -> None:
    engine = evaluations(in_vllm.directory)[1]["engine"]
    assert engine.startswith("vLLM 0.")
    for page in ("report/index.html", "export/README.md"):
        assert engine in (in_vllm.directory / page).read_text()
