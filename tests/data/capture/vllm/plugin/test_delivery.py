"""Slices of samples on their way from vLLM's cache to a spool."""

import threading
from pathlib import Path

import pytest
import torch
from torch import Tensor

from data.capture.transport.protocol import StateRequest
from data.capture.transport.spool import Spool
from data.capture.vllm.plugin.cache_copy import CacheReader, HostCopy
from data.capture.vllm.plugin.delivery import Deliveries
from tests.processes import wait_for

NUM_LAYERS, BLOCK_SIZE, HIDDEN_SIZE, NUM_BLOCKS = 3, 4, 8, 12
NUM_TOKENS = 30
SLICE_BYTES = 2 * BLOCK_SIZE * (NUM_LAYERS + 1) * HIDDEN_SIZE * 4
ENDS = (8, 16, 24, NUM_TOKENS)


class Prompt:
    """A prompt whose states are in a cache, from which they are copied two blocks at a time."""

    def __init__(self, key: str, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        cache = torch.randn(NUM_BLOCKS, NUM_LAYERS + 1, BLOCK_SIZE, HIDDEN_SIZE, generator=generator)
        self.block_ids = torch.randperm(NUM_BLOCKS, generator=generator).tolist()
        self.reader = CacheReader(cache)
        self.states = cache.transpose(1, 2)[self.block_ids].flatten(0, 1)[:NUM_TOKENS]
        ids = torch.randint(100, (NUM_TOKENS,), generator=generator)
        self.request = StateRequest(key, ids, torch.ones(NUM_TOKENS, dtype=torch.bool))
        self.may_finish = threading.Event()

    def copy(self, index: int) -> HostCopy:
        """Return a slice whose copy has finished once `may_finish` is set."""
        first = index * 2 * BLOCK_SIZE
        copy = self.reader.copy(self.block_ids[first // BLOCK_SIZE :], ENDS[index] - first)
        return HostCopy(copy.states, copy.num_bytes, self.may_finish.is_set, lambda: _wait(self.may_finish))

    def taken(self, spool: Spool) -> Tensor:
        sample = spool.take(self.request, timeout=1000)
        assert sample is not None
        return torch.cat([sample.aux_hidden_states, sample.final_hidden_states[:, None]], dim=1)[1:-2]


def _wait(event: threading.Event) -> None:
    assert event.wait(1000)


def test_slices_of_several_samples_arrive_in_order_and_hold_no_more_than_the_bound(tmp_path: Path) -> None:
    spool, deliveries = Spool(tmp_path, "exact"), Deliveries(NUM_LAYERS, 3 * SLICE_BYTES)
    prompts = [Prompt(f"{number}", number) for number in range(3)]
    opened = [deliveries.open(spool, prompt.request) for prompt in prompts]
    for number, index in ((0, 0), (1, 0), (0, 1)):
        assert deliveries.has_room(SLICE_BYTES)
        opened[number].add(prompts[number].copy(index))
    assert not deliveries.has_room(SLICE_BYTES)
    for prompt in prompts:
        prompt.may_finish.set()
    wait_for(lambda: deliveries.has_room(7 * SLICE_BYTES))  # one always may, if it is alone
    assert not any(spool.arrived(prompt.request.key) for prompt in prompts)
    for number, indices in ((0, (2, 3)), (1, (1, 2, 3)), (2, (0, 1, 2, 3))):
        for index in indices:
            opened[number].add(prompts[number].copy(index))
    for prompt in prompts:
        assert torch.equal(prompt.taken(spool), prompt.states[1:-2])
    deliveries.close()
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_delivered_costs_itself_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    deliveries, (lost, other) = Deliveries(NUM_LAYERS, 1 << 20), (Prompt("lost", 0), Prompt("other", 1))
    spool = Spool(tmp_path, "exact")
    nowhere = deliveries.open(Spool(tmp_path / "no", "exact"), lost.request)
    delivery = deliveries.open(spool, other.request)
    for prompt, to in ((lost, nowhere), (other, delivery)):
        prompt.may_finish.set()
        for index in range(4):
            to.add(prompt.copy(index))
    assert torch.equal(other.taken(spool), other.states[1:-2])
    deliveries.close()
    [line] = capsys.readouterr().err.splitlines()
    assert "eagle31: lost was not delivered: FileNotFoundError" in line
    assert deliveries.has_room(2 << 20)
