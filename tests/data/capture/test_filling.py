from collections import namedtuple
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from threading import Event, Thread

import pytest
import torch
from datasets import Dataset
from torch import Tensor

from data.capture import filling
from data.capture.filling import (
    StoreSpec,
    fill_store,
    finish_store,
    open_store,
)
from data.capture.hf import HiddenStateCapture
from data.capture.hf_source import TransformersStates
from data.capture.tokens import dataset_lengths, dataset_rows, tokens_fingerprint
from data.samples import CapturedSample, StateShape
from data.store import HiddenStateStore
from data.store.codec import Rows, decode, encode, encoded_bytes
from data.store.index import refuse
from data.store.manage import retry
from data.store.shards import FinishedShards, ShardFile, write_shard
from data.store.writer import StoreWriter
from eagle31.errors import UserError
from tests.data.target.tiny_target import make_capture, make_dataset, save_target

SHARD_TOKENS, BATCH_TOKENS = 40, 48
FIELDS = {"target": "tiny", "aux_layer_ids": (0, 2, 5)}
CODEC = "exact"


class CountingCapture(HiddenStateCapture):
    """A capture that records its batches."""

    def capture(self, batch: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
        self.batches = [*getattr(self, "batches", []), [ids.tolist() for ids in batch]]
        return super().capture(batch)


@pytest.fixture
def capture(tmp_path_factory: pytest.TempPathFactory) -> CountingCapture:
    own = make_capture(save_target(tmp_path_factory.mktemp("target")))
    return CountingCapture(own.model, own.modules, own.aux_layer_ids)


def shape_of(capture: HiddenStateCapture) -> StateShape:
    return StateShape(len(capture.aux_layer_ids), capture.hidden_size, capture.dtype)


def store_of(directory: Path, dataset: Dataset, codec: str = CODEC, made: dict = FIELDS) -> StoreSpec:
    return StoreSpec(directory, dataset, codec, tokens_fingerprint(dataset), made)


def _capture(
    capture: HiddenStateCapture, directory: Path, rank: int = 0, world_size: int = 1, **changes
) -> None:
    own = {"dataset": make_dataset(), "codec": CODEC, "made": FIELDS} | changes
    expected = store_of(directory, own.pop("dataset"), own.pop("codec"), own.pop("made"))
    options = {"shard_tokens": SHARD_TOKENS} | own
    fill_store(
        expected,
        TransformersStates(expected.dataset, capture, expected.codec, BATCH_TOKENS).captured,
        shape_of(capture),
        rank=rank,
        world_size=world_size,
        **options,
    )


def _captured(capture: CountingCapture, dataset: Dataset) -> list[int]:
    """Return the samples that went through the target."""
    ids = dataset["input_ids"][:]
    return sorted(ids.index(own) for own in chain(*getattr(capture, "batches", [])))


@pytest.mark.parametrize("codec", [CODEC, "fp8"])
def test_a_store_and_online_training_have_what_the_target_gives_one_by_one(
    tmp_path: Path, capture: CountingCapture, codec: str
) -> None:
    dataset = make_dataset()
    _capture(capture, tmp_path, codec=codec)
    store = HiddenStateStore(tmp_path)
    assert store.sample_ids.tolist() == list(range(12))
    assert store.lengths.tolist() == [len(ids) for ids in dataset["input_ids"]]
    # Other batches round differently, which may move a state to the next fp8 number.
    tolerance = {"rtol": 0.13, "atol": 1e-2} if codec == "fp8" else {"rtol": 1e-5, "atol": 1e-5}
    for row, found in zip(dataset, store.get_many(range(12)), strict=True):
        ids, mask = torch.tensor(row["input_ids"]), torch.tensor(row["loss_mask"])
        [states] = capture.capture([ids])
        expected = decode(encode(CapturedSample(ids, mask, *states), codec))
        for name, tensor in vars(expected).items():
            torch.testing.assert_close(getattr(found, name), tensor, **tolerance)
    capture.batches = []
    online, order = TransformersStates(dataset, capture, codec, BATCH_TOKENS), [7, 0, 11, 3, 7]
    for ours, stored in zip(online.get_many(order), store.get_many(order), strict=True):
        for name, tensor in vars(stored).items():
            torch.testing.assert_close(getattr(ours, name), tensor, **tolerance)
    assert 1 < len(capture.batches) < len(order)
    assert online.lengths == dataset_lengths(dataset)


def test_batches_are_of_like_length_and_bounded(tmp_path: Path, capture: CountingCapture) -> None:
    _capture(capture, tmp_path)
    sizes = [[len(ids) for ids in batch] for batch in capture.batches]
    assert len(sizes) < 12
    assert all(max(batch) * len(batch) <= BATCH_TOKENS for batch in sizes)
    assert [*chain(*sizes)] == sorted([*chain(*sizes)], reverse=True)


def test_resume_does_only_the_shard_that_is_gone(tmp_path: Path, capture: CountingCapture) -> None:
    dataset = make_dataset()
    capture.batches = []
    _capture(capture, tmp_path)
    first_batches = {tuple(map(tuple, batch)) for batch in capture.batches}
    before = HiddenStateStore(tmp_path).get_many(range(12))
    lost = ShardFile(tmp_path / "shard-rank-0-00001.safetensors").record().sample_ids
    kept = {path: path.read_bytes() for path in tmp_path.glob("shard-rank-0-0000[02]*")}
    (tmp_path / "shard-rank-0-00001.safetensors").unlink()
    (tmp_path / ".shard-rank-0-00001.safetensors.partial").write_bytes(b"half")
    capture.batches = []
    _capture(capture, tmp_path)
    # The batches are those of the first time, which round in the same way.
    assert set(lost) <= set(_captured(capture, dataset))
    assert {tuple(map(tuple, batch)) for batch in capture.batches} < first_batches
    assert {path: path.read_bytes() for path in kept} == kept
    assert sorted(i for record in FinishedShards(tmp_path).records() for i in record.sample_ids) == list(
        range(12)
    )
    assert not list(tmp_path.glob(".shard*"))
    for a, b in zip(before, HiddenStateStore(tmp_path).get_many(range(12)), strict=True):
        assert a.aux_hidden_states.equal(b.aux_hidden_states)
    capture.batches = []
    _capture(capture, tmp_path)
    assert capture.batches == []


def test_ranks_share_the_samples_and_all_return_to_a_finished_store(
    tmp_path: Path, capture: CountingCapture, monkeypatch: pytest.MonkeyPatch
) -> None:
    _capture(capture, tmp_path / "one")
    capture.batches = []
    lengths = []
    waits, wait_until = Event(), filling._wait_until

    def wait(condition: Callable[[], bool]) -> None:
        if not condition():
            waits.set()
        wait_until(condition)

    monkeypatch.setattr(filling, "_wait_until", wait)

    def run(rank: int) -> None:
        _capture(capture, tmp_path / "two", rank, world_size=2)
        lengths.append(HiddenStateStore(tmp_path / "two").lengths.tolist())

    run_late = Thread(target=run, args=(1,))
    run_first = Thread(target=run, args=(0,))
    run_first.start()
    assert waits.wait(100)  # for the other rank's samples
    assert not (tmp_path / "two" / "manifest.json").exists()
    run_late.start()
    run_first.join()
    run_late.join()
    one, two = HiddenStateStore(tmp_path / "one"), HiddenStateStore(tmp_path / "two")
    assert lengths == [one.lengths.tolist()] * 2
    assert _captured(capture, make_dataset()) == list(range(12))
    for a, b in zip(one.get_many(range(12)), two.get_many(range(12)), strict=True):
        torch.testing.assert_close(a.aux_hidden_states, b.aux_hidden_states, rtol=1e-5, atol=1e-5)


def test_another_capture_in_the_directory_is_refused(tmp_path: Path, capture: CountingCapture) -> None:
    _capture(capture, tmp_path)
    with pytest.raises(UserError, match=r"another target"):
        _capture(capture, tmp_path, made=FIELDS | {"target": "other"})
    with pytest.raises(UserError, match=r"another codec"):
        _capture(capture, tmp_path, codec="fp8")
    _capture(capture, tmp_path, shard_tokens=SHARD_TOKENS + 1)  # only what is written from here on


def test_other_data_of_the_same_lengths_is_refused(tmp_path: Path, capture: CountingCapture) -> None:
    _capture(capture, tmp_path)
    (tmp_path / "shard-rank-0-00001.safetensors").unlink()
    ids = make_dataset()["input_ids"][:]
    changed = [ids[0], [*ids[1][:-1], ids[1][-1] ^ 1], *ids[2:]]
    other = make_dataset().remove_columns("input_ids").add_column("input_ids", changed)
    assert dataset_lengths(other) == dataset_lengths(make_dataset())
    with pytest.raises(UserError, match=r"another tokens_fingerprint"):
        _capture(capture, tmp_path, dataset=other)
    _capture(capture, tmp_path)
    manifest = HiddenStateStore(tmp_path).manifest
    assert manifest["tokens_fingerprint"] == tokens_fingerprint(make_dataset())


def _fill(directory: Path, dataset: Dataset, ids: Sequence[int]) -> None:
    with StoreWriter(directory, "other", CODEC, 1000) as writer:
        for i in ids:
            row = dataset[i]
            states = torch.zeros(len(row["input_ids"]), 3, 4)
            tokens = torch.tensor(row["input_ids"]), torch.tensor(row["loss_mask"])
            writer.append(i, CapturedSample(*tokens, states, states[:, 0]))


def opened(directory: Path) -> tuple[Dataset, StoreSpec]:
    """Open a store in a directory, and return it with its dataset."""
    store = store_of(directory, make_dataset())
    assert open_store(store) == list(range(12))
    return store.dataset, store


def test_refused_samples_count_as_done_until_they_are_tried_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dataset, store = opened(tmp_path)
    refuse(tmp_path, 7, "the server does not take it")
    assert open_store(store) == [i for i in range(12) if i != 7]
    _fill(tmp_path, dataset, open_store(store))
    finish_store(store)
    reported = capsys.readouterr().err
    assert "1 of 12 samples were refused" in reported
    assert "sample 7: the server does not take it" in reported
    assert HiddenStateStore(tmp_path).sample_ids.tolist() == [i for i in range(12) if i != 7]
    assert retry(tmp_path) == {7: "the server does not take it"}
    with pytest.raises(UserError, match="has no manifest"):
        HiddenStateStore(tmp_path)
    assert open_store(store) == [7]
    _fill(tmp_path, dataset, [7])
    finish_store(store)
    assert HiddenStateStore(tmp_path).sample_ids.tolist() == list(range(12))


def test_a_store_of_many_writers_is_finished_with_one_read_of_each_shard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_writers, read = 512, ShardFile.record
    states = CapturedSample(torch.tensor([1]), torch.tensor([True]), torch.zeros(1, 3, 4), torch.zeros(1, 4))
    for i in range(num_writers):
        write_shard(tmp_path / f"shard-rank-{i}-00000.safetensors", [(i, encode(states, CODEC))])
    files: list[str] = []
    monkeypatch.setattr(ShardFile, "record", lambda shard: files.append(shard._file.path.name) or read(shard))
    StoreWriter(tmp_path, "rank-7", CODEC, 1000).close()
    assert not files
    dataset = Dataset.from_dict({"input_ids": [[1]] * num_writers, "loss_mask": [[True]] * num_writers})
    store = store_of(tmp_path, dataset)
    assert not open_store(store)
    finish_store(store)
    assert len(files) == num_writers
    assert len(HiddenStateStore(tmp_path)) == num_writers


@pytest.mark.parametrize("num_refused", [6, 7])
def test_a_store_may_lack_half_of_a_few_samples(tmp_path: Path, num_refused: int) -> None:
    dataset, store = opened(tmp_path)
    _fill(tmp_path, dataset, range(num_refused, 12))
    for sample_id in range(num_refused):
        refuse(tmp_path, sample_id, "the server takes nothing")
    if num_refused == 6:
        finish_store(store)
        return
    with pytest.raises(UserError, match=r"7 of 12 samples refused.*scripts/store retry"):
        finish_store(store)
    assert not (tmp_path / "manifest.json").exists()


def test_too_small_a_disk_is_refused_before_it_starts(
    tmp_path: Path, capture: CountingCapture, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    rows = Rows(*dataset_rows(make_dataset()).sum(axis=0).tolist())
    needed = encoded_bytes(CODEC, rows, shape_of(capture))
    usage = namedtuple("usage", "free")
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage(needed - 1))
    with pytest.raises(UserError, match=r"data\.max_samples, or set capture\.mode=online"):
        _capture(capture, tmp_path)
    assert not hasattr(capture, "batches")
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage(needed))
    _capture(capture, tmp_path)
    assert "GB" in capsys.readouterr().err
    written = HiddenStateStore(tmp_path).manifest["num_bytes"]
    assert written == pytest.approx(needed, rel=0.1)
