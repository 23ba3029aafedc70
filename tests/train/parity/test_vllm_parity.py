"""vLLM serves what is trained: exports of every kind, compared with the real engine draft by draft.

Both of vLLM's model runners serve them; the classic mistakes in an export show there. The drafter of most
tests, without a window and in vLLM's layout, is compared in tests/train/stages/test_evaluate.py.
"""

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.data.capture.vllm.targets import KV_CACHE_BYTES
from tests.runs.here import run_command
from tests.runs.model_runner import model_runner
from tests.train.parity.engines import ENOUGH, FEW, EngineResults, K, decode_job, run_together
from tests.train.parity.mutations import MUTATIONS, mutate
from tests.train.parity.parity_cases import (
    CASES,
    PUBLISHED,
    export_path,
    is_trained,
    require_export,
    target_path,
)
from tests.train.parity.published import as_published
from train.engines.serving import DecodeJob, JobResult
from train.evaluation.parity import Comparison, check_case

pytestmark = pytest.mark.timeout(7200)
MIN_DRAFTS = {"V1": 200, "V2": 20}
EXPANDED = [name for name, case in CASES.items() if case.expand_mla]
CASE = "eagle31_llama3_rope"  # pruned, with every norm, and RoPE scaled: most mistakes can be made in it
WINDOW_CASE = "eagle3_yarn_window_pruned_norm_before_four_aux"


def case_of(mistake: str) -> str:
    """Return the case in whose export a mistake is made."""
    return WINDOW_CASE if mistake == "sliding window dropped" else CASE


def mistaken(name: str, trained: Path, directory: Path) -> Path:
    """Return an export with this mistake in a directory, which is made."""
    return mutate(require_export(case_of(name), trained), directory, MUTATIONS[name])


@pytest.fixture(scope="module")
def published(trained: Path, full: bool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Exports as somebody else would have published them."""
    directory = tmp_path_factory.mktemp("published")
    return {
        name: as_published(export_path(name, trained).resolve(), directory / name)
        for name in PUBLISHED
        if full and is_trained(name, trained)
    }


@pytest.fixture(scope="module")
def engines(
    case_names: Sequence[str],
    trained: Path,
    full: bool,
    published: dict[str, Path],
    vllm_python: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> EngineResults:
    """Each target alone, with each of its exports, with what others publish, and with each mistake.

    Without `--full` one target alone, and the exports, which Model Runner V2 gets in both cases.
    """
    names = [name for name in case_names if is_trained(name, trained)]
    of_target = {CASES[name].target: name for name in (names if full else names[:1])}
    jobs = [decode_job(f"plain {target}", name, None, trained) for target, name in of_target.items()]
    jobs += [decode_job(name, name, export_path(name, trained).resolve(), trained) for name in names]
    jobs += [decode_job(f"published {name}", name, path, trained) for name, path in published.items()]
    logs = tmp_path_factory.mktemp("vllm")
    for name in MUTATIONS if full else ():
        export = mistaken(name, trained, logs / name.replace(" ", "_"))
        jobs.append(decode_job(name, case_of(name), export, trained))
    few = [
        decode_job(f"V2 {name}", name, export_path(name, trained).resolve(), trained, FEW) for name in names
    ]
    results = run_all(jobs, vllm_python, logs / "vllm")
    with model_runner("V2", vllm_python, logs / "v2") as python:
        return EngineResults(trained, results | run_all(few, python, logs / "vllm_v2"))


def run_all(jobs: Sequence[DecodeJob], python: Path, logs: Path) -> dict[str, JobResult]:
    """Run jobs, with and without MLA as plain attention: a process has this setting as a whole."""
    expanded = [job for job in jobs if job.name.removeprefix("V2 ") in EXPANDED]
    results = run_together([job for job in jobs if job not in expanded], python, logs.with_suffix(".log"))
    if expanded:
        with pytest.MonkeyPatch.context() as environment:
            environment.setenv("VLLM_MLA_DISABLE", "1")
            results |= run_together(expanded, python, logs.with_name(f"{logs.name}_expanded.log"))
    return results


def compare(engines: EngineResults, name: str, runner: str = "V1") -> Comparison:
    job, amount = {"V1": (name, ENOUGH), "V2": (f"V2 {name}", FEW)}[runner]
    export = require_export(name, engines.trained)
    assert engines.decoded(job).model_runner == runner
    return engines.compare(job, name, export, amount)


LONG = pytest.mark.full("the long matrix")


@pytest.mark.parametrize("runner", ["V1", "V2"])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if case.core else LONG) for name, case in CASES.items()]
)
def test_vllm_drafts_what_the_evaluator_drafts(name: str, runner: str, engines: EngineResults) -> None:
    comparison = compare(engines, name, runner)
    listed = "\n".join(map(str, [*comparison.drafts, *comparison.plain_completions, *comparison.completions]))
    assert comparison.passed, f"{comparison.failures}\n{listed}"
    assert comparison.num_compared >= MIN_DRAFTS[runner]
    # An untrained drafter is right by accident only, and agreeing on nothing shows nothing.
    assert comparison.vllm.acceptance_length > 1.1, "not trained"


@pytest.mark.full("another engine for each")
@pytest.mark.parametrize("name", PUBLISHED)
def test_what_others_publish_is_read_as_vllm_reads_it(
    name: str, engines: EngineResults, published: dict[str, Path]
) -> None:
    require_export(name, engines.trained)
    comparison = engines.compare(f"published {name}", name, published[name])
    assert comparison.passed, comparison.failures
    assert comparison.num_compared >= MIN_DRAFTS["V1"]
    # The weights are the same: whoever reads them, they draft as they were trained.
    assert comparison.vllm == compare(engines, name).vllm


@pytest.mark.full("another engine for each")
@pytest.mark.parametrize("name", MUTATIONS)
def test_a_classic_mistake_shows_in_vllm(name: str, engines: EngineResults) -> None:
    if engines.results[name].error is None:  # else vLLM itself refuses it
        reference = engines.reference(case_of(name), require_export(case_of(name), engines.trained))
        assert not check_case(reference, engines.served(name), None, K).passed


@pytest.mark.full("it starts vLLM again for each of the two")
@pytest.mark.parametrize(
    ("name", "dtype"), [(CASE, "float32"), ("eagle3_norm_before_full_vocab_two_aux_bf16", "bfloat16")]
)
def test_check_serving_passes_a_good_export(
    name: str, dtype: str, trained: Path, vllm_python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EAGLE31_VLLM_PYTHON", str(vllm_python))
    done = run_command(
        "scripts/check_serving",
        *(require_export(name, trained), "--target", target_path(name, trained), "--dtype", dtype),
        *("--json", tmp_path / "out.json", "--engine-args", f"kv_cache_memory_bytes={KV_CACHE_BYTES}"),
    )
    assert done.status == 0, done.out + done.err
    assert "verdict: vLLM serves what was trained" in done.out
