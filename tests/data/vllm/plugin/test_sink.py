import errno
import os
import time
from collections.abc import Callable
from dataclasses import replace
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
from data.vllm.plugin.cache_copy import CacheReader, HostCopy
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


def deliver(sink: StateSink, capture: CaptureRequest, num_tokens: int = 6) -> Tensor:
    """Submit a sample and return its states [T, L, Ht]."""
    copy = CacheReader(make_cache()).copy([5, 2, 6], num_tokens)
    sink.submit(PendingWrite(capture, torch.arange(num_tokens), copy))
    return copy.states


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


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


def test_a_pause_or_its_client_ends_a_shard(tmp_path: Path) -> None:
    sink = StateSink("server", NUM_LAYERS - 1, max_bytes=1 << 20, times=OutletTimes(flush=0.2))
    states = deliver(sink, capture_of(store_at(tmp_path), "3"))
    wait_for(lambda: 3 in captured_ids(tmp_path))
    deliver(sink, capture_of(store_at(tmp_path), "1"))
    sink.close()
    assert [record.sample_ids for record in FinishedShards(tmp_path).records()] == [(3,), (1,)]
    tensors = load_file(tmp_path / FinishedShards(tmp_path).records()[0].file)
    assert tensors["aux_hidden_states"].equal(states[:, :-1])
    assert tensors["final_hidden_states"].equal(states[:, -1])

    sink = StateSink("server", NUM_LAYERS - 1, max_bytes=1 << 20)
    for number, client in enumerate("ab"):
        deliver(sink, capture_of(store_at(tmp_path / client), str(number), client=client))
    sink.flush("b")
    wait_for(lambda: (tmp_path / "b").exists() and captured_ids(tmp_path / "b") == {1})
    assert captured_ids(tmp_path / "a") == set()
    sink.close()
    assert captured_ids(tmp_path / "a") == {0}


def test_copies_are_bounded_and_no_destination_takes_all_the_room(tmp_path: Path) -> None:
    stuck = Event()
    sink = StateSink("server", NUM_LAYERS - 1, max_bytes=5 * 6 * NUM_LAYERS * HIDDEN_SIZE * 4)
    slow, other = (capture_of(store_at(tmp_path / name)) for name in ("slow", "other"))
    copy = CacheReader(make_cache()).copy([5, 2, 6], 6)
    one = copy.states.nbytes
    assert sink.has_room(slow, 100 * one)  # a single one of any size may wait
    held = PendingWrite(
        slow, torch.arange(6), HostCopy(copy.states, lambda: True, lambda: bool(stuck.wait()))
    )
    sink.submit(held)
    sink.submit(held)
    assert not sink.has_room(slow, 2 * one)
    assert sink.has_room(other, 3 * one)
    assert not sink.has_room(other, 4 * one)
    stuck.set()
    sink.close()
    assert sink.has_room(slow, 5 * one)


def test_a_destination_that_cannot_be_written_fails_for_its_clients_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "store").write_text("a file where the store should be")
    sink = StateSink("server", NUM_LAYERS - 1, max_bytes=1 << 20)
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
    assert sink.has_room(good, 1 << 20)


def test_a_full_disk_is_reported_when_the_shard_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_shard(path: Path, *_: object) -> None:
        if path.parent.name == "full":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(path, *_)  # type: ignore[arg-type]

    write = store_writer.write_shard
    monkeypatch.setattr(store_writer, "write_shard", write_shard)
    sink = StateSink("server", NUM_LAYERS - 1, max_bytes=1 << 20)
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
    sink = StateSink("server", NUM_LAYERS - 1, max_bytes=1 << 20)
    for number, name in enumerate(("gone", "alive", "gone", "alive")):
        deliver(sink, capture_of(spools[name].to_json(), f"key-{number}", client=name))
    sink.close()
    assert [spools["alive"].arrived(f"key-{number}") for number in range(4)] == [False, True, False, True]
    assert {failure.client for failure in sink.take_news()} == {"gone"}
    assert sink.has_room(capture_of(spools["alive"].to_json()), 1 << 20)


def test_a_destination_that_is_stuck_is_given_up(tmp_path: Path) -> None:
    sink = StateSink("server", NUM_LAYERS - 1, max_bytes=1 << 20, times=OutletTimes(stuck=0.1))
    stuck, good = (capture_of(store_at(tmp_path / name), client=name) for name in ("stuck", "good"))
    copy, event = CacheReader(make_cache()).copy([5, 2, 6], 6), Event()
    sink.submit(PendingWrite(stuck, torch.arange(6), replace(copy, wait=lambda: bool(event.wait()))))
    time.sleep(0.15)
    deliver(sink, good)
    sink.fail_stuck()
    assert (sink.has_failed(stuck), sink.has_failed(good)) == (True, False)
    assert "no state was written for" in sink.take_news()[0].reason
    assert not sink.has_room(good, 1 << 20)  # the stuck thread may still read its states
    event.set()
    wait_for(lambda: sink.has_room(good, 1 << 20))
    sink.close()
    assert not captured_ids(tmp_path / "stuck") if (tmp_path / "stuck").exists() else True


def test_idle_destinations_are_closed_and_make_room_for_others(tmp_path: Path) -> None:
    def is_open(name: str) -> bool:
        lock = store_writer.hold_name(tmp_path / name, "server")
        if lock is not None:
            lock.close()
        return lock is None

    times = OutletTimes(flush=0.05, idle=0.1)
    sink = StateSink("server", NUM_LAYERS - 1, max_bytes=1 << 20, times=times)
    deliver(sink, capture_of(store_at(tmp_path / "a"), "0"))
    wait_for(lambda: captured_ids(tmp_path / "a") == {0} if (tmp_path / "a").exists() else False)
    wait_for(lambda: not is_open("a"))
    # It is opened again, with another shard size as well.
    deliver(sink, capture_of(store_at(tmp_path / "a"), "1"))
    deliver(sink, capture_of(store_at(tmp_path / "a", shard_tokens=1), "2"))
    sink.close()
    assert captured_ids(tmp_path / "a") == {0, 1, 2}

    sink = StateSink("server", NUM_LAYERS - 1, max_bytes=1 << 20, max_destinations=2)
    for name in "abca":
        capture = capture_of(store_at(tmp_path / name), "7", client=name)
        deliver(sink, capture)
        wait_for(lambda: sink.has_room(capture, 1 << 20))  # noqa: B023
    wait_for(lambda: not is_open("b"))
    assert sink.take_news() == []
    event, copy = Event(), CacheReader(make_cache()).copy([5, 2, 6], 6)
    for name in "cd":
        waits = replace(copy, wait=lambda: bool(event.wait()))
        sink.submit(PendingWrite(capture_of(store_at(tmp_path / name), "8"), torch.arange(6), waits))
    deliver(sink, capture_of(store_at(tmp_path / "e"), client="e"))
    [failure] = sink.take_news()
    assert (failure.client, failure.reason) == ("e", "The server writes to 2 destinations already.")
    event.set()
    sink.close()
    assert [captured_ids(tmp_path / name) for name in "bcd"] == [{7}, {7, 8}, {8}]
