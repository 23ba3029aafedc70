"""Capture in vLLM: the copy from its cache alone, then hidden states against those of transformers."""

import torch

from data.store import HiddenStateStore
from data.vllm.environment import find_python
from data.vllm.plugin.cache_copy import CacheReader
from eagle31.errors import UserError
from train.bench.gpu_check import runs
from train.bench.gpu_check.record import NotRun, Options, Record

STAGES = "stages=[data,vocab,answers,capture]"
BOUNDS = {"cpu": 1e-3, "cuda": 3e-2}  # float32 on a CPU, bf16 on a GPU; relative to the norm of the states


def run(options: Options, record: Record) -> None:
    check_copy(options, record)
    compare(options, record, "capture")


def require_vllm() -> None:
    """Raises NotRun where vLLM is not installed."""
    try:
        find_python()
    except UserError as error:
        raise NotRun(str(error)) from None


def check_copy(options: Options, record: Record) -> None:
    """Check that the copy out of a paged cache gives the bytes that are in it."""
    device = torch.device(options.device_type)
    cache = torch.randn(256, 4, 16, 512, device=device).to(torch.bfloat16)  # blocks, layers, slots, width
    blocks = torch.randperm(256)[:200].tolist()
    num_tokens = len(blocks) * 16 - 5
    reader = CacheReader(cache, longest=num_tokens)
    region = reader.staging.take(reader.bytes_of(num_tokens))
    assert region is not None
    copy = reader.copy(blocks, num_tokens, region)
    copy.wait()
    expected = cache.cpu()[blocks].transpose(1, 2).flatten(0, 1)[:num_tokens]
    how = "a stream and pinned memory" if cache.is_cuda else "on the CPU"
    record.check(
        "the copy from a paged cache is exact",
        copy.finished() and torch.equal(copy.states, expected),
        f"{num_tokens} tokens of {len(blocks)} blocks, {how}",
    )


def compare(options: Options, record: Record, name: str, *overrides: str) -> None:
    """Capture the quickstart's samples in vLLM and compare every state with that of transformers."""
    require_vllm()
    directory = runs.captured_copy(options, name, "capture")
    line = runs.command(options, directory, "capture=vllm", STAGES, *overrides)
    record.figure("the run, with vLLM's start", round(runs.finish(line), 1), "s")
    ours, theirs = (
        HiddenStateStore(runs.store_of(path)) for path in (options.directory / runs.QUICKSTART, directory)
    )
    same = len(ours) == len(theirs)
    record.check("both captured the same samples", same, f"{len(ours)} and {len(theirs)}")
    aux, final = 0.0, 0.0
    for index in range(min(len(ours), len(theirs))):
        one, other = ours[index], theirs[index]
        assert torch.equal(one.input_ids, other.input_ids), f"sample {index} has other tokens"
        aux = max(aux, error(one.aux_hidden_states, other.aux_hidden_states))
        final = max(final, error(one.final_hidden_states, other.final_hidden_states))
    bound = BOUNDS[options.device_type]
    for kind, worst in (("aux", aux), ("final-layer", final)):
        record.figure(f"largest error of a sample's {kind} hidden states", f"{worst:.1e}")
        record.check(f"{kind} hidden states agree", worst <= bound, f"{worst:.1e}; bound {bound:.0e}")


def error(expected: torch.Tensor, found: torch.Tensor) -> float:
    """Return the norm of the difference, relative to the norm of what is expected."""
    expected, found = expected.double(), found.double()
    return float((found - expected).norm() / expected.norm())
