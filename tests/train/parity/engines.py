"""Running the cases' exports in vLLM, and comparing its drafts with those of eagle31's evaluator."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from datasets import load_from_disk

from data.target.parts import load_target_parts
from data.target.spec import TargetSpec
from eagle31.decoding.speculative import Decoded
from eagle31.export.layouts import Layout, layout_of, read_raw_config
from tests.data.capture.vllm.targets import KV_CACHE_BYTES
from tests.train.parity.parity_cases import CASES, target_path
from train.engines.serving import (
    DecodeJob,
    EngineFailure,
    EngineSpec,
    JobResult,
    Served,
    draft_room,
    run_jobs,
)
from train.evaluation.parity import Comparison, check_case, decode_reference

CPU = torch.device("cpu")
K, MAX_NEW_TOKENS, NUM_PROMPTS = 4, 48, 12


@dataclass(frozen=True)
class EngineResults:
    """What vLLM's engines returned for the cases of one directory of trained targets and exports."""

    trained: Path
    results: dict[str, JobResult]
    references: dict[Path, list[Decoded]] = field(default_factory=dict)

    def served(self, name: str) -> Served:
        """Return a job's tokens and drafts; fail the test where its engine failed."""
        result = self.results[name]
        if result.error is not None:
            pytest.fail(f"{name}: {result.error}\n{result.traceback}", pytrace=False)
        return result.passes[0].served

    def reference(self, case: str, export: Path) -> list[Decoded]:
        """Return what the evaluator makes of an export on a case's target and prompts."""
        if export not in self.references:
            target = target_path(case, self.trained)
            spec = TargetSpec(str(target), dtype="float32")
            self.references[export] = decode_reference(
                export,
                load_target_parts(spec),
                spec,
                held_out_prompts(self.trained, CASES[case].target),
                CPU,
                k=K,
                max_new_tokens=MAX_NEW_TOKENS,
                stop_token_ids=(),
            )
        return self.references[export]

    def compare(self, job: str, case: str, export: Path) -> Comparison:
        """Compare a job's drafts with the evaluator's, and its text with the target's if that ran alone."""
        alone = f"plain {CASES[case].target}"
        plain = self.served(alone) if alone in self.results else None
        return check_case(self.reference(case, export), self.served(job), plain, K)


def held_out_prompts(trained: Path, target: str) -> list[list[int]]:
    [answers] = (trained / "runs" / target / "artifacts").glob("answers-*/test")
    rows = load_from_disk(str(answers))
    return [row["input_ids"][: row["num_prompt_tokens"]] for row in rows][:NUM_PROMPTS]


def decode_job(name: str, case: str, export: Path | None, trained: Path) -> DecodeJob:
    """Return a job without stop tokens, so that every prompt gives as many drafts as it can."""
    prompts = held_out_prompts(trained, CASES[case].target)
    engine = EngineSpec(
        target=str(target_path(case, trained)),
        export=export,
        k=K,
        bare=export is not None and layout_of(read_raw_config(export)) is Layout.speculators,
        max_model_len=max(map(len, prompts)) + MAX_NEW_TOKENS + draft_room(K),
        max_num_seqs=NUM_PROMPTS,
        extra={"kv_cache_memory_bytes": KV_CACHE_BYTES},
    )
    return DecodeJob(name, engine, prompts, MAX_NEW_TOKENS, record_drafts=export is not None)


def run_together(jobs: Sequence[DecodeJob], python: Path, log: Path) -> dict[str, JobResult]:
    """Run all jobs in one process of vLLM, which takes half a minute to start.

    Where that process dies, each target's jobs run in a separate process, so that no target's failure is
    another's.
    """
    try:
        return {result.name: result for result in run_jobs(jobs, python, log)}
    except EngineFailure as failure:
        targets = list(dict.fromkeys(job.engine.target for job in jobs))
        if len(targets) == 1:
            return {job.name: JobResult(job.name, (), (), 0.0, "", error=str(failure)) for job in jobs}
    results: dict[str, JobResult] = {}
    for index, target in enumerate(targets):
        own = [job for job in jobs if job.engine.target == target]
        results |= run_together(own, python, log.with_name(f"{log.stem}_{index}.log"))
    return results
