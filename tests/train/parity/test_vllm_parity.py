"""What is trained is what vLLM serves: every kind of export, held against the real engine draft by draft."""

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from datasets import load_from_disk

from data.target.parts import load_target_parts
from data.target.spec import TargetSpec
from eagle31.decoding.speculative import Decoded
from eagle31.export.layouts import Layout, layout_of, read_raw_config
from eagle31.json_files import write_text
from tests.train.parity.mutations import MUTATIONS, mutate
from tests.train.parity.parity_cases import CASES, CORE, PUBLISHED, export_path, target_path
from tests.train.parity.published import as_published
from train.drafter.export_checks import validate_export
from train.parity.compare import Comparison, check_case
from train.parity.reference import decode_reference, reference_drafter
from train.serving.drafts import Served
from train.serving.engine import DecodeJob, EngineSpec, JobResult, draft_room, run_jobs

ROOT = Path(__file__).resolve().parents[3]
CPU = torch.device("cpu")
K, MAX_NEW_TOKENS, NUM_PROMPTS = 4, 64, 12
MIN_DRAFTS = 200
MUTATED = "eagle31_llama3_rope"  # pruned, with every norm, and RoPE scaled: each mistake can be made in it
TABLE = ROOT / "docs" / "serving_parity.md"


@dataclass(frozen=True)
class Held:
    """One case, and what both sides made of it."""

    export: Path
    target: Path
    comparison: Comparison


@dataclass(frozen=True)
class ServedCases:
    """Everything that vLLM ran, in one process."""

    cases: dict[str, Held]
    mutations: dict[str, Comparison | str]  # a string is the engine's own refusal
    published: dict[str, Comparison]
    vllm_version: str


@pytest.fixture(scope="module")
def case_names(request: pytest.FixtureRequest) -> Sequence[str]:
    return tuple(CASES) if request.config.getoption("--full") else CORE


@pytest.fixture(scope="module")
def trained(
    case_names: Sequence[str], tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Path:
    """Targets and exports of all cases, from real runs of the pipeline; shorter ones without `--full`."""
    directory = tmp_path_factory.mktemp("parity")
    rows_per_step, ttt_steps = ("4", "4") if request.config.getoption("--full") else ("2", "3")
    script = str(Path(__file__).with_name("parity_cases.py"))
    done = subprocess.run(
        [sys.executable, script, str(directory), rows_per_step, ttt_steps, *case_names],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return directory


@pytest.fixture(scope="module")
def served(
    case_names: Sequence[str],
    trained: Path,
    vllm_python: Path,
    tmp_path_factory: pytest.TempPathFactory,
    request: pytest.FixtureRequest,
) -> ServedCases:
    """Runs all engines in one process of vLLM, which takes half a minute to start."""
    scratch = tmp_path_factory.mktemp("vllm")
    prompts = {name: held_out_prompts(trained, CASES[name].target) for name in case_names}
    jobs = []
    for target in dict.fromkeys(CASES[name].target for name in case_names):
        name = next(name for name in case_names if CASES[name].target == target)
        jobs.append(decode_job(f"plain {target}", target_path(name, trained), None, prompts[name]))
    for name in case_names:
        export, target_directory = export_path(name, trained).resolve(), target_path(name, trained)
        jobs.append(decode_job(name, target_directory, export, prompts[name]))
    for name, (mutation, _) in MUTATIONS.items():
        mutated = mutate(export_path(MUTATED, trained).resolve(), scratch / name.replace(" ", "_"), mutation)
        jobs.append(decode_job(name, target_path(MUTATED, trained), mutated, prompts[MUTATED]))
    published = {}
    for name in PUBLISHED:
        published[name] = as_published(export_path(name, trained).resolve(), scratch / f"published_{name}")
        jobs.append(
            decode_job(f"published {name}", target_path(name, trained), published[name], prompts[name])
        )
    expanded = [name for name in case_names if CASES[name].expand_mla]
    results = run_all(jobs, expanded, vllm_python, scratch)
    cases = {}
    references = {
        name: reference_of(export_path(name, trained), target_path(name, trained), prompts[name])
        for name in case_names
    }
    for name in case_names:
        plain = succeeded(results[f"plain {CASES[name].target}"])
        comparison = check_case(references[name], succeeded(results[name]), plain, K)
        cases[name] = Held(export_path(name, trained).resolve(), target_path(name, trained), comparison)
    found = ServedCases(
        cases,
        {name: against(references[MUTATED], results[name]) for name in MUTATIONS},
        {
            name: check_case(
                reference_of(published[name], target_path(name, trained), prompts[name]),
                succeeded(results[f"published {name}"]),
                succeeded(results[f"plain {CASES[name].target}"]),
                K,
            )
            for name in PUBLISHED
        },
        next(iter(results.values())).vllm_version,
    )
    if request.config.getoption("--full"):
        write_text(TABLE, format_table(found))
    return found


def run_all(
    jobs: Sequence[DecodeJob], expanded: Sequence[str], python: Path, scratch: Path
) -> dict[str, JobResult]:
    """In one process, and one more for the jobs named `expanded`, whose setting a process has as a whole."""
    together = [job for job in jobs if job.name not in expanded]
    apart = [job for job in jobs if job.name in expanded]
    results = run_jobs(together, python, scratch / "vllm.log")
    if apart:
        with pytest.MonkeyPatch.context() as environment:
            environment.setenv("VLLM_MLA_DISABLE", "1")
            results += run_jobs(apart, python, scratch / "vllm_expanded.log")
    return {result.name: result for result in results}


def succeeded(result: JobResult) -> Served:
    assert result.error is None, f"{result.name}: {result.error}"
    return result.passes[0].served


def against(reference: Sequence[Decoded], result: JobResult) -> Comparison | str:
    """A mutated export's drafts against those of what was trained."""
    return result.error or check_case(reference, result.passes[0].served, None, K)


def held_out_prompts(trained: Path, target: str) -> list[list[int]]:
    [answers] = (trained / "runs" / target / "artifacts").glob("answers-*/test")
    rows = load_from_disk(str(answers))
    return [row["input_ids"][: row["num_prompt_tokens"]] for row in rows][:NUM_PROMPTS]


def decode_job(name: str, target: Path, export: Path | None, prompts: list[list[int]]) -> DecodeJob:
    """Without stop tokens: every prompt gives as many drafts as it can."""
    engine = EngineSpec(
        target=str(target),
        export=export,
        k=K,
        bare=export is not None and layout_of(read_raw_config(export)) is Layout.speculators,
        max_model_len=max(map(len, prompts)) + MAX_NEW_TOKENS + draft_room(K),
        max_num_seqs=NUM_PROMPTS,
    )
    return DecodeJob(name, engine, prompts, MAX_NEW_TOKENS, record_drafts=export is not None)


def reference_of(export: Path, target: Path, prompts: list[list[int]]) -> list[Decoded]:
    spec = TargetSpec(str(target), dtype="float32")
    reference = reference_drafter(export, load_target_parts(spec), CPU, torch.float32)
    return decode_reference(
        reference, spec, prompts, CPU, k=K, max_new_tokens=MAX_NEW_TOKENS, stop_token_ids=()
    )


def format_table(found: ServedCases) -> str:
    rows = [
        "| export | target | drafts compared | equal | near-ties | different | "
        "acceptance length, eagle31 | vLLM | text |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, held in found.cases.items():
        c = held.comparison
        same = c.num_completions - len(c.plain_completions)
        rows.append(
            f"| {name} | {CASES[name].target} | {c.num_compared} | {c.num_equal} | {len(c.near_ties)} "
            f"| {len(c.differences)} | {c.ours.acceptance_length:.3f} | {c.vllm.acceptance_length:.3f} "
            f"| {same} of {c.num_completions} identical |"
        )
    mutated = [
        "| mistake | acceptance length, trained | served by vLLM | drafts that differ |",
        "|---|---|---|---|",
    ]
    for name, comparison in found.mutations.items():
        if isinstance(comparison, str):
            mutated.append(f"| {name} | | vLLM refuses it | |")
        else:
            mutated.append(
                f"| {name} | {comparison.ours.acceptance_length:.3f} | "
                f"{comparison.vllm.acceptance_length:.3f} | {len(comparison.differences)} of "
                f"{comparison.num_compared} |"
            )
    return "\n".join(
        [
            "# Exports held against vLLM",
            "",
            f"Written by `scripts/test --full`: vLLM {found.vllm_version} on the CPU, float32, k = {K},",
            "temperature 0. Every export comes from a real run on a small trained target. Each draft's",
            "tokens and accepted count are compared with eagle31's evaluator, the text with vLLM's own.",
            "",
            *rows,
            "",
            f"The classic mistakes, made in the export `{MUTATED}` and served:",
            "",
            *mutated,
            "",
        ]
    )


@pytest.mark.parametrize("name", CASES)
def test_vllm_drafts_what_the_evaluator_drafts(
    name: str, case_names: Sequence[str], served: ServedCases
) -> None:
    if name not in case_names:
        pytest.skip("part of scripts/test --full")
    comparison = served.cases[name].comparison
    listed = "\n".join(map(str, [*comparison.drafts, *comparison.plain_completions, *comparison.completions]))
    assert comparison.passed, f"{comparison.failures}\n{listed}"
    assert comparison.num_compared >= MIN_DRAFTS
    # An untrained drafter is right by accident only, and agreeing on nothing shows nothing.
    assert comparison.vllm.acceptance_length > 1.1, "not trained"


@pytest.mark.parametrize("name", PUBLISHED)
def test_what_others_publish_is_read_as_vllm_reads_it(name: str, served: ServedCases) -> None:
    comparison = served.published[name]
    assert comparison.passed, comparison.failures
    assert comparison.num_compared >= MIN_DRAFTS
    # The same weights: whoever reads them, they draft as they were trained.
    assert comparison.vllm == served.cases[name].comparison.vllm


@pytest.mark.usefixtures("reload_here")
@pytest.mark.parametrize("name", MUTATIONS)
def test_a_classic_mistake_is_named_before_vllm_starts(name: str, trained: Path, tmp_path: Path) -> None:
    mutation, word = MUTATIONS[name]
    export = mutate(export_path(MUTATED, trained).resolve(), tmp_path / "export", mutation)
    findings = validate_export(export, TargetSpec(str(target_path(MUTATED, trained))))
    assert any(word in finding.field for finding in findings), findings


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_classic_mistake_shows_in_vllm(name: str, served: ServedCases) -> None:
    comparison = served.mutations[name]
    assert isinstance(comparison, str) or not comparison.passed


def test_check_serving_passes_a_good_export(trained: Path, vllm_python: Path, tmp_path: Path) -> None:
    export, target = export_path(MUTATED, trained), target_path(MUTATED, trained)
    few = ("--num-prompts", "6", "--max-new-tokens", "48")
    done = check_serving(export, target, vllm_python, tmp_path / "out.json", *few)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "verdict: vLLM serves what was trained" in done.stdout


@pytest.mark.parametrize("name", MUTATIONS)
def test_check_serving_names_the_mistake_and_starts_nothing(
    name: str, trained: Path, vllm_python: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if name != "pre-norm state fed back" and not request.config.getoption("--full"):
        pytest.skip("part of scripts/test --full")
    mutation, word = MUTATIONS[name]
    export = mutate(export_path(MUTATED, trained).resolve(), tmp_path / "export", mutation)
    done = check_serving(export, target_path(MUTATED, trained), vllm_python, tmp_path / "out.json")
    assert done.returncode == 1
    assert word in done.stdout
    assert "vLLM was not started" in done.stdout


def test_a_bfloat16_engine_accepts_as_much(
    trained: Path, vllm_python: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if not request.config.getoption("--full"):
        pytest.skip("part of scripts/test --full")
    name = "eagle3_norm_before_full_vocab_two_aux_bf16"
    export, target = export_path(name, trained), target_path(name, trained)
    done = check_serving(export, target, vllm_python, tmp_path / "out.json", "--dtype", "bfloat16")
    assert done.returncode == 0, done.stdout + done.stderr


def check_serving(
    export: Path, target: Path, python: Path, out: Path, *arguments: str
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "scripts/check_serving", str(export), "--target", str(target)]
    return subprocess.run(
        [*command, "--json", str(out), *arguments],
        cwd=ROOT,
        env=os.environ | {"EAGLE31_VLLM_PYTHON": str(python)},
        capture_output=True,
        text=True,
    )
