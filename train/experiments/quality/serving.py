"""The check that vLLM accepts as many drafts of a checkpoint as replay says, on the same prompts."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.store import HiddenStateStore
from data.vllm.environment import find_python
from train.experiments.quality.dataset import Dataset
from train.serving.engine import DecodeJob, EngineSpec, draft_room, require, run_jobs
from train.tables import aligned

_NUM_AT_A_TIME = 8


@dataclass(frozen=True)
class ServedAcceptance:
    """What one checkpoint's drafts gave on some prompts, in vLLM and by replay."""

    name: str
    num_drafts: int
    acceptance_length: float
    replay_num_drafts: int
    replay_acceptance_length: float
    num_equal: int  # completions that are the target's
    num_prompts: int


def check_in_vllm(
    dataset: Dataset,
    store: HiddenStateStore,
    checkpoints: dict[str, tuple[Path, dict[str, Any]]],
    *,
    k: int,
    num_prompts: int,
    log: Path,
) -> tuple[list[ServedAcceptance], str]:
    """Decode held-out prompts with each checkpoint in vLLM; return the figures and vLLM's version.

    Args:
        checkpoints: by name, a directory that vLLM loads and the counts of its replay by prompt.

    Raises:
        EngineFailure: vLLM failed.
        UserError: vLLM's environment is missing.
    """
    samples = [store[index] for index in range(min(num_prompts, len(store)))]
    texts = [sample.input_ids.tolist() for sample in samples]
    starts = [int(sample.loss_mask.long().argmax()) for sample in samples]
    prompts = [ids[:start] for ids, start in zip(texts, starts, strict=True)]
    expected = [ids[start:] for ids, start in zip(texts, starts, strict=True)]
    longest = max(map(len, expected))
    jobs = [
        DecodeJob(
            name,
            EngineSpec(
                target=str(dataset.target),
                export=checkpoint.absolute(),
                k=k,
                max_model_len=max(map(len, prompts)) + longest + draft_room(k),
                max_num_seqs=_NUM_AT_A_TIME,
            ),
            prompts,
            longest,
            stop_token_ids=dataset.parts.eos_token_ids,
            record_drafts=True,
        )
        for name, (checkpoint, _) in checkpoints.items()
    ]
    results = [require(result, log) for result in run_jobs(jobs, find_python(), log)]
    found = []
    for result in results:
        served, counts = result.passes[0].served, checkpoints[result.name][1]
        drafts = [draft.num_accepted for of_prompt in served.drafts_within_completions for draft in of_prompt]
        replayed = sum(counts["drafts"][k - 1][: len(samples)])
        accepted = sum(counts["accepted"][k - 1][: len(samples)])
        pairs = zip(served.completions, expected, strict=True)
        found.append(
            ServedAcceptance(
                name=result.name,
                num_drafts=len(drafts),
                acceptance_length=1 + sum(drafts) / max(len(drafts), 1),
                replay_num_drafts=replayed,
                replay_acceptance_length=1 + accepted / max(replayed, 1),
                num_equal=sum(completion[: len(text)] == text for completion, text in pairs),
                num_prompts=len(samples),
            )
        )
    return found, results[0].vllm_version


def served_lines(found: Sequence[ServedAcceptance], version: str) -> list[str]:
    rows = [[f"vLLM {version}", "acceptance length", "by replay", "drafts", "by replay", "completions"]]
    for one in found:
        rows.append(
            [
                one.name,
                f"{one.acceptance_length:.3f}",
                f"{one.replay_acceptance_length:.3f}",
                f"{one.num_drafts:,}",
                f"{one.replay_num_drafts:,}",
                f"{one.num_equal} of {one.num_prompts} equal",
            ]
        )
    return aligned(rows)
