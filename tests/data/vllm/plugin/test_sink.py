import errno
import os
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from data.store import writer as store_writer
from data.store.codec import Encoding
from data.store.shards import FinishedShards, captured_ids
from data.transport.spool import Spool
from data.vllm.capture_request import CaptureRequest
from data.vllm.destinations import store_destination
from data.vllm.plugin.cache_copy import CacheReader
from data.vllm.plugin.outlet import OutletTimes, PendingWrite
from data.vllm.plugin.sink import StateSink

NUM_LAYERS, BLOCK_SIZE, HIDDEN_SIZE = 3, 4, 8
DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")),
]


def make_cache(device: str = "cpu") -> Tensor:
    """[num_blocks, L, block_size, Ht]; a token's states of all layers are contiguous, as in vLLM."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(7, BLOCK_SIZE, NUM_LAYERS, HIDDEN_SIZE, generator=generator).to(device).transpose(1, 2)


def capture_of(destination: Any, key: str = "0", num_tokens: int = 6, client: str = "a") -> CaptureRequest:
    mask = torch.ones(num_tokens, dtype=torch.bool)
    capture = CaptureRequest.of(destination, key, list(range(num_tokens)), mask)
    return replace(capture, client=client)


def store_at(directory: Path, shard_tokens: int = 1000) -> dict[str, Any]:
    return store_destination(directory, Encoding("exact", "all"), shard_tokens)


def wait_until(event: Event) -> None:
    event.wait()


class Sink(StateSink):
    """A sink, and the reader that copies to its memory."""

    def __init__(self, num_bytes: int = 1 << 20, **options: Any) -> None:
        self.reader = CacheReader(make_cache(), longest=12, staging_bytes=num_bytes)
        super().__init__("server", NUM_LAYERS - 1, self.reader.staging, **options)

    def pending(self, capture: CaptureRequest, until: Event | None = None) -> PendingWrite | None:
        """Return a sample of six tokens that is copied until the event, if there is room."""
        region = self.reserve(capture, self.reader.bytes_of(6))
        if region is None:
            return None
        copy = self.reader.copy([5, 2, 6], 6, region)
        if until is not None:
            copy = replace(copy, wait=partial(wait_until, until))
        return PendingWrite(capture, torch.arange(6), copy)

    @property
    def holds_nothing(self) -> bool:
        return self.staging.free_bytes == self.staging.num_bytes


def deliver(sink: Sink, capture: CaptureRequest, until: Event | None = None) -> Tensor:
    """Submit a sample and return its states [T, L, Ht]."""
    pending = sink.pending(capture, until)
    assert pending is not None
    states = pending.copy.states.clone()
    sink.submit(pending)
    return states


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("num_tokens", [1, 4, 6, 12])
def test_a_prompts_blocks_are_concatenated(device: str, num_tokens: int) -> None:
    cache = make_cache(device)
    reader = CacheReader(cache, longest=12)
    region = reader.staging.take(reader.bytes_of(num_tokens))
    assert region is not None
    copy = reader.copy([5, 2, 6], num_tokens, region)
    copy.wait()
    assert copy.finished()
    expected = torch.cat([cache[block].transpose(0, 1) for block in (5, 2, 6)])[:num_tokens].cpu()
    cache.zero_()
    assert copy.states.equal(expected)
    assert copy.states.is_pinned() == (device == "cuda")
    assert copy.states.nbytes <= reader.bytes_of(num_tokens) <= region.num_bytes


def test_a_pause_or_its_client_ends_a_shard(tmp_path: Path) -> None:
    sink = Sink(times=OutletTimes(flush=0.2))
    states = deliver(sink, capture_of(store_at(tmp_path), "3"))
    wait_for(lambda: 3 in captured_ids(tmp_path))
    deliver(sink, capture_of(store_at(tmp_path), "1"))
    sink.close()
    assert [record.sample_ids for record in FinishedShards(tmp_path).records()] == [(3,), (1,)]
    tensors = load_file(tmp_path / FinishedShards(tmp_path).records()[0].file)
    assert tensors["aux_hidden_states"].equal(states[:, :-1])
    assert tensors["final_hidden_states"].equal(states[:, -1])

    sink = Sink()
    for number, client in enumerate("ab"):
        deliver(sink, capture_of(store_at(tmp_path / client), str(number), client=client))
    sink.flush("b")
    wait_for(lambda: (tmp_path / "b").exists() and captured_ids(tmp_path / "b") == {1})
    assert captured_ids(tmp_path / "a") == set()
    sink.close()
    assert captured_ids(tmp_path / "a") == {0}


def test_copies_are_bounded_and_no_destination_takes_all_the_room(tmp_path: Path) -> None:
    ended = Event()
    one = -(-CacheReader(make_cache(), longest=12).bytes_of(6) // 512) * 512
    sink = Sink(num_bytes=5 * one)
    slow, other = (capture_of(store_at(tmp_path / name)) for name in ("slow", "other"))
    for _ in range(2):
        deliver(sink, slow, until=ended)
    assert sink.pending(slow) is not None  # as much as is left
    assert sink.pending(slow) is None
    deliver(sink, other)
    wait_for(lambda: sink.staging.free_bytes == 2 * one)
    ended.set()
    sink.close()
    assert sink.staging.free_bytes == 4 * one  # the one that was not submitted holds its memory


@pytest.mark.parametrize("codec", ["exact", "bf16", "fp8"])
def test_the_open_shard_holds_none_of_the_memory_for_copies(codec: str, tmp_path: Path) -> None:
    """It is not written before 1000 tokens, and the memory is used again at once."""
    sink = Sink(num_bytes=1536)
    destination = store_destination(tmp_path, Encoding(codec, "supervised"), 1000)
    expected = []
    for number in range(20):
        sink.reader._blocks.fill_(number)
        expected.append(deliver(sink, capture_of(destination, str(number))))
        wait_for(lambda: sink.holds_nothing)
    sink.close()
    [record] = FinishedShards(tmp_path).records()
    assert record.sample_ids == tuple(range(20))
    tensors = load_file(tmp_path / record.file)
    if codec != "fp8":
        states = torch.cat([one[:4, :-1] for one in expected])
        assert tensors["aux_hidden_states"].float().equal(states)


def test_a_destination_that_cannot_be_written_fails_for_its_clients_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "store").write_text("a file where the store should be")
    sink = Sink()
    broken, good = (
        capture_of(store_at(tmp_path / "store"), client="b"),
        capture_of(store_at(tmp_path / "good")),
    )
    deliver(sink, broken)
    wait_for(lambda: sink.has_failed(broken))
    deliver(sink, good)
    deliver(sink, broken)
    assert not sink.has_failed(good)
    [(client, destination, reason)] = sink.take_news()
    assert (client, destination) == ("b", str(tmp_path / "store"))
    assert reason.startswith("FileExistsError")
    assert sink.take_news() == []
    # A client that starts again finds the destination mended.
    (tmp_path / "store").unlink()
    deliver(sink, replace(broken, client="c"))
    sink.close()
    assert [captured_ids(tmp_path / name) for name in ("store", "good")] == [{0}, {0}]
    assert f"states for {tmp_path / 'store'} are dropped: FileExistsError" in capsys.readouterr().err
    assert sink.holds_nothing


def test_a_full_disk_is_reported_when_the_shard_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_shard(path: Path, *_: object) -> None:
        if path.parent.name == "full":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(path, *_)  # type: ignore[arg-type]

    write = store_writer.write_shard
    monkeypatch.setattr(store_writer, "write_shard", write_shard)
    sink = Sink()
    for name in ("full", "good"):
        deliver(sink, capture_of(store_at(tmp_path / name), client=name))
        sink.flush(name)
    wait_for(lambda: sink.has_failed(capture_of(store_at(tmp_path / "full"), client="full")))
    assert "The disk is full" in sink.take_news()[0].reason
    sink.close()
    assert captured_ids(tmp_path / "good") == {0}


def test_a_trainer_that_has_ended_costs_its_own_states_only(tmp_path: Path) -> None:
    (tmp_path / "alive").mkdir()
    spools = {name: Spool(tmp_path / name, Encoding("exact", "all")) for name in ("gone", "alive")}
    sink = Sink()
    for number, name in enumerate(("gone", "alive", "gone", "alive")):
        deliver(sink, capture_of(spools[name].to_json(), f"key-{number}", client=name))
    sink.close()
    assert [spools["alive"].arrived(f"key-{number}") for number in range(4)] == [False, True, False, True]
    assert {failure.client for failure in sink.take_news()} == {"gone"}
    assert sink.holds_nothing


def test_a_destination_that_is_stuck_is_given_up(tmp_path: Path) -> None:
    sink = Sink(times=OutletTimes(stuck=1.0))
    stuck, good = (capture_of(store_at(tmp_path / name), client=name) for name in ("stuck", "good"))
    event = Event()
    deliver(sink, stuck, until=event)
    time.sleep(1.1)
    deliver(sink, good)
    sink.fail_stuck()
    assert (sink.has_failed(stuck), sink.has_failed(good)) == (True, False)
    assert "no state was written for" in sink.take_news()[0].reason
    assert not sink.holds_nothing  # the stuck thread may still read its states
    event.set()
    wait_for(lambda: sink.holds_nothing)
    sink.close()
    assert captured_ids(tmp_path / "stuck") == set()


def test_idle_destinations_are_closed_and_make_room_for_others(tmp_path: Path) -> None:
    def is_open(name: str) -> bool:
        lock = store_writer.hold_name(tmp_path / name, "server")
        if lock is not None:
            lock.close()
        return lock is None

    times = OutletTimes(flush=0.05, idle=0.1)
    sink = Sink(times=times)
    deliver(sink, capture_of(store_at(tmp_path / "a"), "0"))
    wait_for(lambda: captured_ids(tmp_path / "a") == {0} if (tmp_path / "a").exists() else False)
    wait_for(lambda: not is_open("a"))
    # It is opened again, with another shard size as well.
    deliver(sink, capture_of(store_at(tmp_path / "a"), "1"))
    deliver(sink, capture_of(store_at(tmp_path / "a", shard_tokens=1), "2"))
    sink.close()
    assert captured_ids(tmp_path / "a") == {0, 1, 2}

    sink = Sink(max_destinations=2)
    for name in "abca":
        capture = capture_of(store_at(tmp_path / name), "7", client=name)
        deliver(sink, capture)
        wait_for(lambda: sink.holds_nothing)
    wait_for(lambda: not is_open("b"))
    assert sink.take_news() == []
    event = Event()
    for name in "cd":
        deliver(sink, capture_of(store_at(tmp_path / name), "8"), until=event)
    deliver(sink, capture_of(store_at(tmp_path / "e"), client="e"))
    [failure] = sink.take_news()
    assert (failure.client, failure.reason) == ("e", "The server writes to 2 destinations already.")
    event.set()
    sink.close()
    assert [captured_ids(tmp_path / name) for name in "bcd"] == [{7}, {7, 8}, {8}]
