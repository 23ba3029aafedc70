"""Running the cases' exports in vLLM, and comparing its drafts with those of the trained drafter."""

from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import pytest
import torch
from datasets import load_from_disk

from data.target.parts import load_target_parts
from data.target.spec import TargetSpec
from eagle31.export.layouts import Layout, layout_of, read_raw_config
from eagle31.export.read import load_export
from tests.data.capture.vllm.targets import KV_CACHE_BYTES
from tests.train.parity.parity_cases import CASES, SCALED_FROM, target_path
from train.drafter.published import target_defaults
from train.evaluation.parity import Comparison, compare_engine
from train.evaluation.serving import (
    DecodeJob,
    EngineFailure,
    EngineSpec,
    JobResult,
    draft_room,
)

CPU = torch.device("cpu")
K = 4


@dataclass(frozen=True)
class Amount:
    """How many prompts an engine completes, and by how many tokens."""

    num_prompts: int = 12
    max_new_tokens: int = 48


ENOUGH = Amount()
FEW = Amount(4, 16)  # for Model Runner V2, whose kernels are interpreted


@dataclass(frozen=True)
class EngineResults:
    """What vLLM's engines returned for the cases of one directory of trained targets and exports."""

    trained: Path
    results: dict[str, JobResult | EngineFailure]

    def decoded(self, name: str) -> JobResult:
        """Return a job's result; fail the test where its engine failed."""
        result = self.results[name]
        if isinstance(result, EngineFailure):
            pytest.fail(str(result), pytrace=False)
        return result

    def compare(self, job: str, case: str, export: Path, amount: Amount = ENOUGH) -> Comparison:
        """Compare a job's drafts and completions with the trained drafter and the target."""
        spec = TargetSpec(str(target_path(case, self.trained)), dtype="float32")
        parts = load_target_parts(spec)
        loaded = load_export(export, CPU, torch.float32, target=target_defaults(parts))
        prompts = held_out_prompts(self.trained, CASES[case].target)[: amount.num_prompts]
        return compare_engine(loaded, parts, spec, prompts, self.decoded(job).served, K, torch.float32)


def held_out_prompts(trained: Path, target: str) -> list[list[int]]:
    [answers] = (trained / "runs" / target / "artifacts").glob("answers-*/test")
    rows = load_from_disk(str(answers))
    prompts = [row["input_ids"][: row["num_prompt_tokens"]] for row in rows]
    # What follows the first is at over four times the positions of before RoPE was scaled.
    return [[*chain(*prompts)][: 4 * SCALED_FROM], *prompts]


def decode_job(name: str, case: str, export: Path, trained: Path, amount: Amount = ENOUGH) -> DecodeJob:
    """Return a job without stop tokens, so that every prompt gives as many drafts as it can."""
    prompts = held_out_prompts(trained, CASES[case].target)[: amount.num_prompts]
    bare = layout_of(read_raw_config(export)) is Layout.speculators  # as for `vllm serve EXPORT`
    engine = EngineSpec(
        target=TargetSpec(str(export if bare else target_path(case, trained)), dtype="float32"),
        export=None if bare else export,
        k=K,
        max_model_len=max(map(len, prompts)) + amount.max_new_tokens + draft_room(K),
        max_num_seqs=amount.num_prompts,
        extra={"kv_cache_memory_bytes": KV_CACHE_BYTES},
    )
    return DecodeJob(name, engine, prompts, amount.max_new_tokens)
