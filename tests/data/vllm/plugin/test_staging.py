import random
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from data.vllm.plugin.cache_copy import CacheReader
from data.vllm.plugin.staging import Region, Staging
from tests.pretended_gpu.pretended_gpu import CUDA, PretendedGpu


def test_parts_do_not_overlap_and_join_again_in_any_order() -> None:
    staging = Staging(64 * 512, pinned=False)
    order = random.Random(0)
    taken: list[Region] = []
    num_refused = 0
    for _ in range(2000):
        region = staging.take(order.choice([1, 500, 512, 3000, 9000]))
        if region is None:
            num_refused += 1
        else:
            taken.append(region)
        if region is None or order.random() < 0.4:
            staging.give(taken.pop(order.randrange(len(taken))))
        parts = sorted((one.start, one.start + one.num_bytes) for one in taken)
        assert all(end <= start for (_, end), (start, _) in pairwise(parts))
        assert staging.free_bytes == staging.num_bytes - sum(one.num_bytes for one in taken)
    assert num_refused > 100
    for region in taken:
        staging.give(region)
    whole = staging.take(staging.num_bytes)
    assert whole == Region(0, staging.num_bytes)
    assert staging.take(1) is None


def test_a_view_lies_in_its_part() -> None:
    staging = Staging(2048, pinned=False)
    first, second = staging.take(10), staging.take(1000)
    assert first is not None
    assert second is not None
    staging.view(first, (128,), torch.float32).zero_()
    staging.view(second, (5, 50), torch.float32).fill_(1)
    assert staging.view(first, (128,), torch.float32).eq(1).sum() == 0
    with pytest.raises(AssertionError):
        staging.view(first, (129,), torch.float32)


def test_memory_is_allocated_once_and_holds_the_longest_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = torch.zeros(100, 3, 4, 8).transpose(1, 2).contiguous().transpose(1, 2)
    needed = 9 * 4 * 3 * 8 * 4
    with pytest.raises(ValueError, match="max_pending_gb must be at least"):
        CacheReader(cache, longest=33, staging_bytes=needed - 1)
    assert CacheReader(cache, longest=33, staging_bytes=needed).staging.take(needed) is not None
    monkeypatch.setattr("data.vllm.plugin.cache_copy.STAGING_BYTES", needed // 2)
    reader = CacheReader(cache, longest=33)
    assert reader.staging.num_bytes == -(-needed // 512) * 512

    def empty(*_: object, **__: object) -> Tensor:
        raise AssertionError("memory was allocated for a copy")

    monkeypatch.setattr(torch, "empty", empty)
    for _ in range(5):
        region = reader.staging.take(reader.bytes_of(33))
        assert region is not None
        copy = reader.copy(list(range(9)), 33, region)
        assert copy.states.untyped_storage().data_ptr() == reader.staging._buffer.data_ptr()
        reader.staging.give(region)


def test_copies_from_a_gpu_are_to_pinned_memory_and_nobody_waits() -> None:
    with PretendedGpu() as gpu:
        cache = torch.empty(100, 4, 3, 8, device=CUDA).transpose(1, 2)
        reader = CacheReader(cache, longest=33, staging_bytes=1 << 20)
        with gpu.no_waiting():
            for _ in range(3):
                region = reader.staging.take(reader.bytes_of(33))
                assert region is not None
                copy = reader.copy(list(range(9)), 33, region)
                assert copy.states.is_pinned()
                assert copy.states.untyped_storage().data_ptr() == reader.staging._buffer.data_ptr()
        assert copy.states.shape == (33, 3, 8)
