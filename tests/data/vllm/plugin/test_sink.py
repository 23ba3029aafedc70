import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from data.store.codec import Encoding
from data.store.shards import FinishedShards, captured_ids
from data.transport.spool import Spool
from data.vllm.capture_request import CaptureRequest, store_destination
from data.vllm.plugin.cache_copy import CacheReader
from data.vllm.plugin.sink import PendingWrite, StateSink

NUM_LAYERS, BLOCK_SIZE, HIDDEN_SIZE = 3, 4, 8
DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")),
]


def make_cache(device: str = "cpu") -> Tensor:
    """[num_blocks, L, block_size, Ht]; a token's states of all layers are contiguous, as in vLLM."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(7, BLOCK_SIZE, NUM_LAYERS, HIDDEN_SIZE, generator=generator).to(device).transpose(1, 2)


def deliver(sink: StateSink, store: Path, sample_id: int, num_tokens: int = 6) -> Tensor:
    """Submit a sample and return its states [T, L, Ht]."""
    copy = CacheReader(make_cache()).copy([5, 2, 6], num_tokens)
    input_ids = torch.arange(num_tokens)
    destination = store_destination(store, Encoding("exact", "all"), shard_tokens=1000)
    mask = torch.ones(num_tokens, dtype=torch.bool)
    capture = CaptureRequest.of(destination, str(sample_id), input_ids.tolist(), mask)
    sink.submit(PendingWrite(capture, input_ids, copy))
    return copy.states


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("num_tokens", [1, 4, 6, 12])
def test_a_prompts_blocks_are_concatenated(device: str, num_tokens: int) -> None:
    cache = make_cache(device)
    copy = CacheReader(cache).copy([5, 2, 6], num_tokens)
    copy.wait()
    assert copy.finished()
    expected = torch.cat([cache[block].transpose(0, 1) for block in (5, 2, 6)])[:num_tokens].cpu()
    cache.zero_()
    assert copy.states.equal(expected)
    assert CacheReader(cache).bytes_of(num_tokens) == copy.states.nbytes


def test_a_pause_ends_a_shard(tmp_path: Path) -> None:
    sink = StateSink("server", NUM_LAYERS - 1, max_bytes=1 << 20)
    states = deliver(sink, tmp_path, 3)
    deadline = time.monotonic() + 30
    while 3 not in captured_ids(tmp_path):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    deliver(sink, tmp_path, 1)
    sink.close()
    assert [record.sample_ids for record in FinishedShards(tmp_path).records()] == [(3,), (1,)]
    tensors = load_file(tmp_path / FinishedShards(tmp_path).records()[0].file)
    assert tensors["aux_hidden_states"].equal(states[:, :-1])
    assert tensors["final_hidden_states"].equal(states[:, -1])


def test_copies_are_bounded_but_for_a_single_one(tmp_path: Path) -> None:
    sink = StateSink("server", NUM_LAYERS - 1, max_bytes=1000)
    assert sink.has_room(5000)
    deliver(sink, tmp_path, 0)
    sink.close()
    assert sink.has_room(5000)
    sink._bytes = 400
    assert sink.has_room(600)
    assert not sink.has_room(601)


def test_what_cannot_be_written_is_reported(tmp_path: Path) -> None:
    (tmp_path / "store").write_text("a file where the store should be")
    sink = StateSink("server", NUM_LAYERS - 1, max_bytes=1 << 20)
    deliver(sink, tmp_path / "store", 0)
    with pytest.raises(FileExistsError):
        sink.close()
    with pytest.raises(FileExistsError):
        sink.check()


def test_a_trainer_that_has_ended_costs_its_own_states_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "alive").mkdir()
    spools = {name: Spool(tmp_path / name, Encoding("exact", "all")) for name in ("gone", "alive")}
    sink = StateSink("server", NUM_LAYERS - 1, max_bytes=1 << 20)
    input_ids, mask = torch.arange(6), torch.ones(6, dtype=torch.bool)
    for number, name in enumerate(("gone", "alive", "gone", "alive")):
        copy = CacheReader(make_cache()).copy([5, 2, 6], 6)
        capture = CaptureRequest.of(spools[name].to_json(), f"key-{number}", input_ids.tolist(), mask)
        sink.submit(PendingWrite(capture, input_ids, copy))
    sink.close()
    assert [spools["alive"].arrived(f"key-{number}") for number in range(4)] == [False, True, False, True]
    dropped = capsys.readouterr().err
    assert [f"key-{number} are dropped" in dropped for number in range(4)] == [True, False, True, False]
    assert sink.has_room(1 << 20)
