"""vLLM with a drafter, driven from outside: jobs for `serving_worker.py`, and their results."""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from data.capture.vllm.arguments import attention_backend
from data.capture.vllm.environment import environment
from data.supervised import run_supervised
from data.target.spec import TargetSpec
from eagle31.decoding.acceptance import AcceptanceStats
from eagle31.decoding.speculative import Decoded
from eagle31.export.layouts import read_raw_config, served_method
from eagle31.json_files import read_json, write_json

WORKER = Path(__file__).with_name("serving_worker.py")
_TAIL_LINES = 20


class EngineFailure(RuntimeError):
    """vLLM failed; the message holds the end of its log."""


@dataclass(frozen=True)
class EngineSpec:
    """The description of one engine: the target, alone or with a drafter."""

    # With the dtype to serve; or an export in speculators' layout, which names its target.
    target: TargetSpec
    export: Path | None = None
    mtp: bool = False  # without an export: whether the target's own MTP head drafts
    k: int = 0  # tokens per draft
    max_model_len: int = 1024
    max_num_seqs: int | None = 1  # None: as many as a server of vLLM
    enforce_eager: bool = True
    extra: dict[str, Any] = field(default_factory=dict)  # further arguments of `vllm.LLM`

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of `vllm.LLM`."""
        arguments: dict[str, Any] = {
            "model": self.target.checkpoint.path,
            "dtype": self.target.dtype,
            "trust_remote_code": self.target.trust_remote_code,
            "max_model_len": self.max_model_len,
            "enforce_eager": self.enforce_eager,
            "skip_tokenizer_init": True,  # token ids in, token ids out
            "language_model_only": True,  # the processor of a multimodal target needs its tokenizer
            "enable_prefix_caching": False,  # prompts are repeated, and each one is to be computed
            "disable_log_stats": False,
        }
        if self.max_num_seqs is not None:
            arguments["max_num_seqs"] = self.max_num_seqs
        if self.target.revision is not None:
            arguments["revision"] = self.target.revision
        backend = attention_backend(str(self.extra.get("dtype", self.target.dtype)))
        if "attention_config" not in self.extra:  # vLLM takes one of the two
            arguments |= backend
        drafter: dict[str, Any] = {}
        if self.mtp:
            drafter = {"method": "mtp"}
        elif self.export is not None:
            method = served_method(read_raw_config(self.export))
            drafter = {"model": str(self.export), "method": method}
        if drafter:
            # vLLM never gives a drafter its target's backend.
            arguments["speculative_config"] = drafter | {"num_speculative_tokens": self.k} | backend
        return arguments | self.extra


@dataclass(frozen=True)
class DecodeJob:
    """A job that completes prompts greedily with one engine, and records its drafts."""

    name: str
    engine: EngineSpec
    prompts: Sequence[Sequence[int]]
    max_new_tokens: int
    stop_token_ids: Sequence[int] = ()

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": "decode",
            "name": self.name,
            # Without async scheduling the scheduler sees the drafted tokens and not their placeholders.
            "engine": self.engine.arguments() | {"async_scheduling": False},
            "prompts": [list(prompt) for prompt in self.prompts],
            "max_tokens": self.max_new_tokens,
            "stop_token_ids": list(self.stop_token_ids),
        }


@dataclass(frozen=True)
class PlacedDraft:
    """One draft, and how many of its tokens were accepted."""

    position: int  # the number of tokens written before it
    token_ids: list[int]
    num_accepted: int


@dataclass(frozen=True)
class Served:
    """The completions of an engine, one per prompt."""

    completions: list[list[int]]
    drafts: list[list[PlacedDraft]]  # with the accepted tokens that are within the completion

    def acceptance(self, k: int) -> list[AcceptanceStats]:
        """Return the statistics of each prompt's drafts of k tokens that are within its completion."""
        return [
            AcceptanceStats.from_lengths(
                k, [draft.num_accepted for draft in drafts if draft.position + k <= len(completion)]
            )
            for drafts, completion in zip(self.drafts, self.completions, strict=True)
        ]


@dataclass(frozen=True)
class JobResult:
    """What the engine of a job decoded."""

    served: Served
    # vLLM's `num_drafts`, `num_accepted` and `accepted_per_position`, also past the end of a completion.
    counters: dict[str, Any]
    model_runner: str  # V1 or V2: vLLM has two, and by default a GPU takes V2 and a CPU V1
    vllm_version: str

    @staticmethod
    def from_json(raw: dict[str, Any]) -> "JobResult":
        """Read a result. Raise EngineFailure if the recorded drafts are not those that vLLM counts."""
        drafts = [[PlacedDraft(**draft) for draft in drafts] for drafts in raw["drafts"]]
        counters = raw["counters"]
        per_position = tuple(counters["accepted_per_position"])
        counted = AcceptanceStats(len(per_position), counters["num_drafts"], per_position)
        accepted = [draft.num_accepted for of_prompt in drafts for draft in of_prompt]
        recorded = AcceptanceStats.from_lengths(len(per_position), accepted)
        if recorded != counted:
            raise EngineFailure(
                f"The recorded drafts ({recorded}) are not those that vLLM counts ({counted})."
            )
        # An engine accepts tokens after the one that ends a completion, too.
        drafts = [
            [replace(one, num_accepted=min(one.num_accepted, len(completion) - one.position)) for one in made]
            for made, completion in zip(drafts, raw["completions"], strict=True)
        ]
        served = Served(raw["completions"], drafts)
        return JobResult(served, counters, raw["model_runner"], raw["vllm_version"])


def run_job(job: DecodeJob, python: Path, log_path: Path) -> JobResult:
    """Run one job.

    Raises:
        EngineFailure: its engine does not start, fails, or has recorded other drafts than it counts.
    """
    [result] = run_jobs([job], python, log_path)
    if isinstance(result, EngineFailure):
        raise result
    return result


def run_jobs(jobs: Sequence[DecodeJob], python: Path, log_path: Path) -> list[JobResult | EngineFailure]:
    """Run all jobs in one process, one engine after the other.

    Where an engine fails, its failure is the result, and the following jobs still run.

    Args:
        python: the Python of vLLM's environment, from `find_python`.
        log_path: the file for everything that vLLM prints.

    Raises:
        EngineFailure: the process died, or an engine has recorded other drafts than it counts.
    """
    raw = run_worker([job.to_json() for job in jobs], python, log_path)
    return [
        failure(job.name, one, log_path) if "error" in one else JobResult.from_json(one)
        for job, one in zip(jobs, raw, strict=True)
    ]


def failure(name: str, raw: dict[str, Any], log_path: Path) -> EngineFailure:
    """Return the error of one job, with vLLM's traceback: the log continues with the following jobs."""
    return EngineFailure(f"vLLM failed ({name}): {raw['error']}\n{_tail(raw['traceback'], log_path)}")


def run_worker(jobs: Sequence[dict[str, Any]], python: Path, log_path: Path) -> list[dict[str, Any]]:
    """Run jobs that `run_jobs` or the benchmark has built, and return their raw results.

    Raises:
        EngineFailure: the process died before it had finished all of them.
    """
    log_path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="eagle31-vllm-") as scratch, log_path.open("wb") as log:
        directory = Path(scratch)
        write_json(directory / "jobs.json", list(jobs))
        # With -I neither our packages nor the files next to the worker are importable.
        command = [str(python), "-I", str(WORKER), str(directory / "jobs.json"), scratch]
        status = run_supervised(command, environment=environment(python), directory=directory, log=log)
        paths = [directory / f"{index}.json" for index in range(len(jobs))]
        if status or not all(path.exists() for path in paths):
            how = f"signal {-status}" if status < 0 else f"status {status}"
            raise EngineFailure(f"vLLM ended with {how}.\n{log_tail(log_path)}")
        return [read_json(path) for path in paths]


def draft_room(k: int) -> int:
    """Return the positions that vLLM needs after a completion: for the draft that runs past it, and the next.

    Where the longest sequence of a batch has fewer, vLLM drafts for no sequence of the batch, and their next
    drafts lack those positions (vllm/v1/worker/gpu_model_runner.py, `input_fits_in_drafter`).
    """
    return 2 * k + 2


def log_tail(log_path: Path) -> str:
    """Return the end of vLLM's log, and its path."""
    return _tail(log_path.read_text(encoding="utf-8", errors="replace"), log_path)


def _tail(text: str, log_path: Path) -> str:
    lines = text.splitlines()[-_TAIL_LINES:]
    return "\n".join([*(f"  | {line}" for line in lines), f"The full log: {log_path}"])


def placed_drafts(decoded: Decoded) -> list[PlacedDraft]:
    """Return the drafts of eagle31's decoder with their positions; the first token needs no draft."""
    position, placed = 1, []
    for token_ids, num_accepted in zip(decoded.drafts, decoded.accepted, strict=True):
        placed.append(PlacedDraft(position, token_ids, num_accepted))
        position += num_accepted + 1
    return placed


def common_length(first: Sequence[int], second: Sequence[int]) -> int:
    """Return the length of the common prefix."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))
