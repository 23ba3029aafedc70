"""Running the cases' exports in vLLM, and comparing its drafts with those of eagle31's evaluator."""

from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

import pytest
import torch
from datasets import load_from_disk

from data.target.parts import load_target_parts
from data.target.spec import TargetSpec
from eagle31.decoding.speculative import Decoded
from eagle31.export.layouts import Layout, layout_of, read_raw_config
from tests.data.capture.vllm.targets import KV_CACHE_BYTES
from tests.train.parity.parity_cases import CASES, SCALED_FROM, target_path
from train.engines.serving import (
    DecodedPass,
    DecodeJob,
    EngineSpec,
    JobResult,
    Served,
    draft_room,
)
from train.evaluation.parity import Comparison, check_case, decode_reference

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
    results: dict[str, JobResult]
    references: dict[tuple[Path, Amount], list[Decoded]] = field(default_factory=dict)

    def decoded(self, name: str) -> DecodedPass:
        """Return a job's only pass; fail the test where its engine failed."""
        result = self.results[name]
        if result.error is not None:
            pytest.fail(f"{name}: {result.error}\n{result.traceback}", pytrace=False)
        return result.passes[0]

    def served(self, name: str) -> Served:
        return self.decoded(name).served

    def reference(self, case: str, export: Path, amount: Amount = ENOUGH) -> list[Decoded]:
        """Return what the evaluator makes of an export on a case's target and prompts."""
        key = (export, amount)
        if key not in self.references:
            target = target_path(case, self.trained)
            spec = TargetSpec(str(target), dtype="float32")
            self.references[key] = decode_reference(
                export,
                load_target_parts(spec),
                spec,
                held_out_prompts(self.trained, CASES[case].target)[: amount.num_prompts],
                CPU,
                k=K,
                max_new_tokens=amount.max_new_tokens,
                stop_token_ids=(),
            )
        return self.references[key]

    def compare(self, job: str, case: str, export: Path, amount: Amount = ENOUGH) -> Comparison:
        """Compare a job's drafts with the evaluator's, and its text with the target's if that ran alone."""
        alone = f"plain {CASES[case].target}"
        plain = self.served(alone) if alone in self.results and amount == ENOUGH else None
        return check_case(self.reference(case, export, amount), self.served(job), plain, K)


def held_out_prompts(trained: Path, target: str) -> list[list[int]]:
    [answers] = (trained / "runs" / target / "artifacts").glob("answers-*/test")
    rows = load_from_disk(str(answers))
    prompts = [row["input_ids"][: row["num_prompt_tokens"]] for row in rows]
    # What follows the first is at over four times the positions of before RoPE was scaled.
    return [[*chain(*prompts)][: 4 * SCALED_FROM], *prompts]


def decode_job(
    name: str, case: str, export: Path | None, trained: Path, amount: Amount = ENOUGH
) -> DecodeJob:
    """Return a job without stop tokens, so that every prompt gives as many drafts as it can."""
    prompts = held_out_prompts(trained, CASES[case].target)[: amount.num_prompts]
    engine = EngineSpec(
        target=str(target_path(case, trained)),
        export=export,
        k=K,
        bare=export is not None and layout_of(read_raw_config(export)) is Layout.speculators,
        max_model_len=max(map(len, prompts)) + amount.max_new_tokens + draft_room(K),
        max_num_seqs=amount.num_prompts,
        extra={"kv_cache_memory_bytes": KV_CACHE_BYTES},
    )
    return DecodeJob(name, engine, prompts, amount.max_new_tokens, record_drafts=export is not None)
