import errno
import itertools
import os
import threading
from collections import namedtuple
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from data.capture.transport.protocol import StateRequest
from data.capture.transport.spool import MEMORY, Spool, open_spool
from data.samples import CapturedSample
from data.store.codec import CODECS, decode, encode
from data.store.shards import bytes_of
from eagle31.errors import UserError
from tests.data.capture.transport.putting import put

NUM_LAYERS, HIDDEN_SIZE = 3, 64


def _request(key: str = "run-0-0", length: int = 40, seed: int = 0) -> StateRequest:
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(length, generator=generator) < 0.7
    return StateRequest(key, torch.randint(1000, (length,), generator=generator), mask)


def _states(request: StateRequest) -> tuple[torch.Tensor, torch.Tensor]:
    """Return views of one tensor, as vLLM's connector has them."""
    generator = torch.Generator().manual_seed(7)
    states = torch.randn(len(request.input_ids), NUM_LAYERS + 1, HIDDEN_SIZE, generator=generator)
    return states[:, :NUM_LAYERS], states[:, NUM_LAYERS]


def _sample(request: StateRequest) -> CapturedSample:
    return CapturedSample(request.input_ids, request.loss_mask, *_states(request))


def assert_equal(found: CapturedSample | None, expected: CapturedSample) -> None:
    assert found is not None
    for name, value in vars(expected).items():
        assert getattr(found, name).dtype == value.dtype
        assert torch.equal(getattr(found, name), value)


@pytest.mark.parametrize("codec", CODECS)
def test_what_is_put_is_taken_once(tmp_path: Path, codec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("data.store.shards._PART_BYTES", 3000)  # of 30,720 of the aux layers
    request = _request()
    put(Spool(tmp_path, codec), request, *_states(request))
    trainer = Spool(tmp_path, codec)
    assert trainer.arrived(request.key)
    expected = decode(encode(_sample(request), codec))
    assert_equal(trainer.take(request, timeout=0), expected)
    assert not list(tmp_path.iterdir())
    assert not trainer.arrived(request.key)
    assert trainer.take(request, timeout=0) is None


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("mask", ["random", "one answer", "none"])
def test_slices_make_the_same_file_and_show_it_at_the_end(tmp_path: Path, codec: str, mask: str) -> None:
    spool, request = Spool(tmp_path, codec), _request()
    if mask != "random":
        request.loss_mask[:] = False
        request.loss_mask[20:30] = mask == "one answer"
    aux, final = _states(request)
    put(spool, request, aux, final)
    [path] = tmp_path.iterdir()
    whole = path.read_bytes()
    path.unlink()
    with spool.writing(request) as write:
        for first, end in itertools.pairwise((0, 16, 17, 32, 40)):
            write(aux[first:end], final[first:end])
            assert not spool.arrived(request.key)
            assert spool.take(request, timeout=0) is None
    assert path.read_bytes() == whole
    assert spool.take(request, timeout=0) is not None


def test_what_is_given_up_midway_leaves_nothing_and_spares_another_attempt(tmp_path: Path) -> None:
    spool, request = Spool(tmp_path, "exact"), _request()
    aux, final = _states(request)
    with suppress(InterruptedError), spool.writing(request) as write:
        write(aux[:16], final[:16])
        assert len(list(tmp_path.iterdir())) == 1
        raise InterruptedError
    assert not list(tmp_path.iterdir())
    with spool.writing(request) as first:
        first(aux[:16], final[:16])
        with spool.writing(request) as second:
            second(aux, final)
        first(aux[16:], final[16:])
    assert [path.name for path in tmp_path.iterdir()] == [f"{request.key}.safetensors"]
    assert_equal(spool.take(request, timeout=0), decode(encode(_sample(request), "exact")))


def test_take_waits_for_a_put_that_comes_later(tmp_path: Path) -> None:
    spool, request = Spool(tmp_path, "exact"), _request()
    thread = threading.Timer(0.2, put, (spool, request, *_states(request)))
    thread.start()
    assert spool.take(request, timeout=1000) is not None
    thread.join()


@pytest.mark.parametrize("damage", ["cut", "altered"])
def test_a_torn_file_on_a_disk_is_not_there_yet(tmp_path: Path, damage: str) -> None:
    spool, request = Spool(tmp_path, "exact"), _request()
    put(spool, request, *_states(request))
    [path] = tmp_path.iterdir()
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] if damage == "cut" else whole[:-1] + bytes([whole[-1] ^ 1]))
    assert spool.take(request, timeout=0) is None
    path.write_bytes(whole)
    assert spool.take(request, timeout=0) is not None


def test_what_a_dead_producer_left_half_written_goes(tmp_path: Path) -> None:
    spool, request, other = Spool(tmp_path, "exact"), _request(), _request("run-0-00")
    for left in (request.key, other.key):
        (tmp_path / f"{left}.1.tmp").write_bytes(b"half")
    put(spool, request, *_states(request))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run-0-0.safetensors", "run-0-00.1.tmp"]
    spool.discard(other.key)
    spool.discard(request.key)
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(tensor: torch.Tensor) -> Iterator[memoryview]:
        yield from itertools.islice(bytes_of(tensor), 1)
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr("data.capture.transport.spool.bytes_of", fail)
    request = _request()
    with pytest.raises(UserError, match=r"capture\.spool_dir=.*disk is full"):
        put(Spool(tmp_path, "exact"), request, *_states(request))
    assert not list(tmp_path.iterdir())


def test_open_spool_is_private_and_removes_what_a_dead_run_left(tmp_path: Path) -> None:
    kept, elsewhere = tmp_path / "eagle31-run-1.abc", tmp_path / "elsewhere"
    for directory in (tmp_path / "eagle31-run-0.abc", kept, elsewhere):
        directory.mkdir()
        (directory / "file").write_bytes(b"left")
    (tmp_path / "eagle31-run-0.link").symlink_to(elsewhere)
    with open_spool(tmp_path, "run-0", "exact", 1000) as spool:
        assert not (tmp_path / "eagle31-run-0.abc").exists()
        assert (kept / "file").exists()
        assert (elsewhere / "file").exists()
        assert spool.directory.stat().st_mode & 0o777 == 0o700
        put(spool, _request(), *_states(_request()))
    assert not spool.directory.exists()
    with open_spool(None, f"test-{tmp_path.name}", "exact", 1000) as spool:
        assert spool.directory.parent == MEMORY


def test_open_spool_needs_a_directory_with_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        pytest.raises(UserError, match=r"capture\.spool_dir"),
        open_spool(tmp_path / "no", "a", "exact", 1),
    ):
        pass
    usage = namedtuple("usage", "free")
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage(10**9 - 1))
    with (
        pytest.raises(UserError, match=r"capture\.spool_gb=1\.00"),
        open_spool(tmp_path, "a", "exact", 10**9),
    ):
        pass
    assert not list(tmp_path.iterdir())
