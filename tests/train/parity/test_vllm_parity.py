"""vLLM serves what is trained: exports of every kind, compared with the real engine draft by draft."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.train.parity.engines import EngineResults, decode_job, run_together
from tests.train.parity.parity_cases import (
    CASES,
    PUBLISHED,
    PUBLISHED_CORE,
    error_path,
    export_path,
    is_trained,
    require_export,
)
from tests.train.parity.published import as_published
from train.evaluation.parity import Comparison

pytestmark = pytest.mark.timeout(7200)
MIN_DRAFTS = 200


@pytest.fixture(scope="module")
def published(trained: Path, full: bool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Exports as somebody else would have published them."""
    directory = tmp_path_factory.mktemp("published")
    return {
        name: as_published(export_path(name, trained).resolve(), directory / name)
        for name in (PUBLISHED if full else PUBLISHED_CORE)
        if is_trained(name, trained)
    }


@pytest.fixture(scope="module")
def engines(
    case_names: Sequence[str],
    trained: Path,
    published: dict[str, Path],
    vllm_python: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> EngineResults:
    """Each target alone, with each of its exports, and with what others publish."""
    names = [name for name in case_names if is_trained(name, trained)]
    of_target = {CASES[name].target: name for name in names}
    jobs = [decode_job(f"plain {target}", name, None, trained) for target, name in of_target.items()]
    jobs += [decode_job(name, name, export_path(name, trained).resolve(), trained) for name in names]
    jobs += [decode_job(f"published {name}", name, path, trained) for name, path in published.items()]
    logs = tmp_path_factory.mktemp("vllm")
    expanded = {name for name in names if CASES[name].expand_mla}
    results = run_together([job for job in jobs if job.name not in expanded], vllm_python, logs / "vllm.log")
    if expanded:
        # A process has this setting as a whole.
        with pytest.MonkeyPatch.context() as environment:
            environment.setenv("VLLM_MLA_DISABLE", "1")
            apart = [job for job in jobs if job.name in expanded]
            results |= run_together(apart, vllm_python, logs / "vllm_expanded.log")
    return EngineResults(trained, results)


def compare(engines: EngineResults, name: str) -> Comparison:
    return engines.compare(name, name, require_export(name, engines.trained))


@pytest.mark.parametrize("name", CASES)
def test_vllm_drafts_what_the_evaluator_drafts(
    name: str, case_names: Sequence[str], request: pytest.FixtureRequest
) -> None:
    if name not in case_names:
        pytest.skip("part of scripts/test --full")
    comparison = compare(request.getfixturevalue("engines"), name)
    listed = "\n".join(map(str, [*comparison.drafts, *comparison.plain_completions, *comparison.completions]))
    assert comparison.passed, f"{comparison.failures}\n{listed}"
    assert comparison.num_compared >= MIN_DRAFTS
    # An untrained drafter is right by accident only, and agreeing on nothing shows nothing.
    assert comparison.vllm.acceptance_length > 1.1, "not trained"


@pytest.mark.parametrize("name", PUBLISHED)
def test_what_others_publish_is_read_as_vllm_reads_it(
    name: str, engines: EngineResults, published: dict[str, Path]
) -> None:
    if name not in published and not error_path(name, engines.trained).exists():
        pytest.skip("part of scripts/test --full")
    require_export(name, engines.trained)
    comparison = engines.compare(f"published {name}", name, published[name])
    assert comparison.passed, comparison.failures
    assert comparison.num_compared >= MIN_DRAFTS
    # The weights are the same: whoever reads them, they draft as they were trained.
    assert comparison.vllm == compare(engines, name).vllm
