"""vLLM serves what is trained: exports of every kind, compared with the real engine draft by draft.

With --full both of vLLM's model runners serve them. The drafter of most tests, without a window and in vLLM's
layout, is compared in tests/train/stages/test_evaluate.py.
"""

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.runs.model_runner import model_runner
from tests.train.parity.engines import ENOUGH, FEW, EngineResults, decode_job
from tests.train.parity.parity_cases import (
    CASES,
    ON_V2_ALONE,
    PUBLISHED,
    export_path,
)
from tests.train.parity.published import as_published
from train.evaluation.parity import Comparison
from train.evaluation.serving import DecodeJob, EngineFailure, JobResult, run_jobs

pytestmark = pytest.mark.timeout(7200)
MIN_DRAFTS = {"V1": 200, "V2": 20}
EXPANDED = [name for name, case in CASES.items() if case.expand_mla]


@pytest.fixture(scope="module")
def published(trained: Path, full: bool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Exports as somebody else would have published them."""
    directory = tmp_path_factory.mktemp("published")
    return {
        name: as_published(export_path(name, trained).resolve(), directory / name)
        for name in PUBLISHED
        if full
    }


@pytest.fixture(scope="module")
def engines(
    case_names: Sequence[str],
    trained: Path,
    published: dict[str, Path],
    full: bool,
    vllm_python: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> EngineResults:
    """Each export with its target; with --full what others publish too, and all exports on V2."""
    names = [name for name in case_names if name not in ON_V2_ALONE]
    jobs = [decode_job(name, name, export_path(name, trained).resolve(), trained) for name in names]
    jobs += [decode_job(f"published {name}", name, path, trained) for name, path in published.items()]
    logs = tmp_path_factory.mktemp("vllm")
    results = run_all(jobs, vllm_python, logs / "vllm")
    others = [
        decode_job(name, name, export_path(name, trained).resolve(), trained, FEW)
        for name in case_names
        if name in ON_V2_ALONE
    ]
    results |= run_all(others, vllm_python, logs / "v2_alone")
    if not full:
        return EngineResults(trained, results)
    few = [
        decode_job(f"V2 {name}", name, export_path(name, trained).resolve(), trained, FEW) for name in names
    ]
    with model_runner("V2", vllm_python, logs / "v2") as python:
        return EngineResults(trained, results | run_all(few, python, logs / "vllm_v2"))


def run_all(jobs: Sequence[DecodeJob], python: Path, logs: Path) -> dict[str, JobResult | EngineFailure]:
    """Run jobs, with and without MLA as plain attention: a process has this setting as a whole."""
    expanded = [job for job in jobs if job.name.removeprefix("V2 ") in EXPANDED]
    plain = [job for job in jobs if job not in expanded]
    results = run_jobs(plain, python, logs.with_suffix(".log"))
    if expanded:
        with pytest.MonkeyPatch.context() as environment:
            environment.setenv("VLLM_MLA_DISABLE", "1")
            results += run_jobs(expanded, python, logs.with_name(f"{logs.name}_expanded.log"))
    return {job.name: result for job, result in zip([*plain, *expanded], results, strict=True)}


def compare(engines: EngineResults, name: str, runner: str = "V1") -> Comparison:
    job, amount = {"V1": (name, ENOUGH), "V2": (f"V2 {name}", FEW)}[runner]
    export = export_path(name, engines.trained).resolve()
    assert engines.decoded(job).model_runner == runner
    return engines.compare(job, name, export, amount)


LONG = pytest.mark.full("the long matrix")


@pytest.mark.parametrize("runner", ["V1", pytest.param("V2", marks=LONG)])
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if case.core else LONG)
        for name, case in CASES.items()
        if name not in ON_V2_ALONE
    ],
)
def test_vllm_drafts_what_the_trained_drafter_drafts(name: str, runner: str, engines: EngineResults) -> None:
    comparison = compare(engines, name, runner)
    check(comparison, MIN_DRAFTS[runner])
    if runner == "V1":  # V2 has too few drafts of the same drafter
        check_trained(comparison)


@pytest.mark.parametrize("name", ["dspark", pytest.param("dflash", marks=LONG)])
def test_vllm_drafts_in_one_pass_what_the_trained_drafter_drafts(name: str, engines: EngineResults) -> None:
    assert engines.decoded(name).model_runner == "V2"
    comparison = engines.compare(name, name, export_path(name, engines.trained).resolve(), FEW)
    check(comparison, MIN_DRAFTS["V2"])
    check_trained(comparison)


def check(comparison: Comparison, min_drafts: int) -> None:
    agreement = comparison.agreement
    listed = "\n".join(f"prompt {prompt}, {one}" for prompt, one in [*agreement.drafts, *agreement.tokens])
    assert comparison.passed, f"{comparison.failures}\n{listed}"
    assert agreement.num_compared >= min_drafts


def check_trained(comparison: Comparison) -> None:
    # An untrained drafter is right by accident only, and agreeing on nothing shows nothing.
    assert comparison.vllm.acceptance_length > 1.1, "not trained"


@pytest.mark.full("another engine for each")
@pytest.mark.parametrize("name", PUBLISHED)
def test_what_others_publish_is_read_as_vllm_reads_it(
    name: str, engines: EngineResults, published: dict[str, Path]
) -> None:
    comparison = engines.compare(f"published {name}", name, published[name])
    assert comparison.passed, comparison.failures
    assert comparison.agreement.num_compared >= MIN_DRAFTS["V1"]
    # The weights are the same: whoever reads them, they draft as they were trained.
    assert comparison.vllm == compare(engines, name).vllm
