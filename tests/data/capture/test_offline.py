from collections import namedtuple
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from threading import Thread

import pytest
import torch
from datasets import Dataset, Features, List, Value, load_from_disk
from safetensors import SafetensorError
from torch import Tensor

from data.capture.hf import HiddenStateCapture
from data.capture.offline import (
    OnlineSource,
    capture_to_store,
    dataset_lengths,
    estimate_bytes,
    tokens_fingerprint,
)
from data.store import HiddenStateStore, plan_shards
from eagle31.errors import UserError
from tests.data.tiny_target import make_capture, make_dataset, save_target

SHARD_TOKENS, BATCH_TOKENS = 40, 48
FIELDS = {"target": "tiny", "aux_layer_ids": (0, 2, 5)}


class CountingCapture(HiddenStateCapture):
    """Remembers the batches it was given."""

    def capture(self, batch: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
        self.batches = [*getattr(self, "batches", []), [ids.tolist() for ids in batch]]
        return super().capture(batch)


@pytest.fixture
def capture(tmp_path_factory: pytest.TempPathFactory) -> CountingCapture:
    own = make_capture(save_target(tmp_path_factory.mktemp("target")))
    return CountingCapture(own.model, own.modules, own.aux_layer_ids)


def _capture(
    capture: HiddenStateCapture, directory: Path, rank: int = 0, world_size: int = 1, **changes
) -> None:
    options = {"dataset": make_dataset(), "shard_tokens": SHARD_TOKENS, "manifest_fields": FIELDS} | changes
    capture_to_store(
        capture=capture,
        output_dir=directory,
        batch_tokens=BATCH_TOKENS,
        rank=rank,
        world_size=world_size,
        **options,
    )


def test_store_online_and_one_by_one_are_equal(tmp_path: Path, capture: CountingCapture) -> None:
    dataset = make_dataset()
    _capture(capture, tmp_path)
    store, online = HiddenStateStore(tmp_path), OnlineSource(dataset, capture, BATCH_TOKENS)
    assert len(store) == len(online) == len(dataset)
    assert store.lengths == online.lengths == [len(ids) for ids in dataset["input_ids"]]
    asked = [*range(len(dataset)), 0, 5]
    for i, a, b in zip(asked, store.get_many(asked), online.get_many(asked), strict=True):
        assert a.input_ids.tolist() == b.input_ids.tolist() == dataset[i]["input_ids"]
        assert a.loss_mask.tolist() == b.loss_mask.tolist() == dataset[i]["loss_mask"]
        [(aux, last)] = capture.capture([torch.tensor(dataset[i]["input_ids"])])
        for found in (a, b):
            torch.testing.assert_close(found.aux_hidden_states, aux, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(found.last_hidden_states, last, rtol=1e-5, atol=1e-5)


def test_batches_are_of_like_length_and_bounded(tmp_path: Path, capture: CountingCapture) -> None:
    OnlineSource(make_dataset(), capture, BATCH_TOKENS).get_many(range(12))
    sizes = [[len(ids) for ids in batch] for batch in capture.batches]
    assert len(sizes) < 12
    assert all(max(batch) * len(batch) <= BATCH_TOKENS for batch in sizes)
    assert [*chain(*sizes)] == sorted([*chain(*sizes)], reverse=True)


@pytest.mark.parametrize("suffix", ["safetensors", "json"])
def test_resume_does_only_the_shard_that_is_gone(
    tmp_path: Path, capture: CountingCapture, suffix: str
) -> None:
    dataset = make_dataset()
    _capture(capture, tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    (tmp_path / f"shard-00001.{suffix}").unlink()
    (tmp_path / "shard-00001.safetensors.tmp").write_bytes(b"half")
    capture.batches = []
    _capture(capture, tmp_path)
    shard = plan_shards(dataset_lengths(dataset), SHARD_TOKENS)[1]
    assert sorted([*chain(*capture.batches)]) == sorted(dataset[i]["input_ids"] for i in shard)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    capture.batches = []
    _capture(capture, tmp_path)
    assert capture.batches == []


def test_ranks_share_the_shards_and_all_return_to_a_finished_store(
    tmp_path: Path, capture: CountingCapture
) -> None:
    _capture(capture, tmp_path / "one")
    lengths = []

    def run(rank: int) -> None:
        _capture(capture, tmp_path / "two", rank, world_size=2)
        lengths.append(HiddenStateStore(tmp_path / "two").lengths)

    capture.batches = []
    run_late = Thread(target=run, args=(1,))
    run_first = Thread(target=run, args=(0,))
    run_first.start()
    run_first.join(timeout=1.0)
    assert run_first.is_alive()  # waits for the other's shards
    assert not (tmp_path / "two" / "manifest.json").exists()
    run_late.start()
    run_first.join(timeout=30)
    run_late.join(timeout=30)
    assert len(lengths) == 2
    assert len([*chain(*capture.batches)]) == len(make_dataset())
    one, two = HiddenStateStore(tmp_path / "one"), HiddenStateStore(tmp_path / "two")
    assert [record.sha256 for record in one.records] == [record.sha256 for record in two.records]


def test_another_capture_in_the_directory_is_refused(tmp_path: Path, capture: CountingCapture) -> None:
    _capture(capture, tmp_path)
    with pytest.raises(UserError, match=r"another target"):
        _capture(capture, tmp_path, manifest_fields=FIELDS | {"target": "other"})
    with pytest.raises(UserError, match=r"another shard_tokens"):
        _capture(capture, tmp_path, shard_tokens=SHARD_TOKENS + 1)


def test_other_data_of_the_same_lengths_is_refused(tmp_path: Path, capture: CountingCapture) -> None:
    _capture(capture, tmp_path)
    (tmp_path / "shard-00001.safetensors").unlink()
    ids = make_dataset()["input_ids"][:]
    changed = [ids[0], [*ids[1][:-1], ids[1][-1] ^ 1], *ids[2:]]
    other = make_dataset().remove_columns("input_ids").add_column("input_ids", changed)
    assert dataset_lengths(other) == dataset_lengths(make_dataset())
    with pytest.raises(UserError, match=r"another tokens_fingerprint"):
        _capture(capture, tmp_path, dataset=other)
    _capture(capture, tmp_path)
    manifest = HiddenStateStore(tmp_path).manifest
    assert manifest["tokens_fingerprint"] == tokens_fingerprint(make_dataset())


def test_tokens_fingerprint_is_of_the_content(tmp_path: Path) -> None:
    dataset = make_dataset()
    own = tokens_fingerprint(dataset)
    dataset.save_to_disk(str(tmp_path / "saved"))
    assert tokens_fingerprint(load_from_disk(str(tmp_path / "saved"))) == own
    as_written = Features({"input_ids": List(Value("int32")), "loss_mask": List(Value("bool"))})
    assert tokens_fingerprint(dataset.cast(as_written)) == own
    assert tokens_fingerprint(dataset.select(range(11, -1, -1)).select(range(11, -1, -1))) == own
    rows = dataset.to_list()
    masked = [{**rows[0], "loss_mask": [not one for one in rows[0]["loss_mask"]]}, *rows[1:]]
    # The same tokens in a row, divided otherwise.
    head, tail = rows[0]["input_ids"][:-1], [*rows[0]["input_ids"][-1:], *rows[1]["input_ids"]]
    masks = rows[0]["loss_mask"][:-1], [*rows[0]["loss_mask"][-1:], *rows[1]["loss_mask"]]
    divided = [
        {"input_ids": head, "loss_mask": masks[0]},
        {"input_ids": tail, "loss_mask": masks[1]},
        *rows[2:],
    ]
    others = [dataset.select(range(11)), dataset.select([1, 0, *range(2, 12)])]
    others += [Dataset.from_list(masked), Dataset.from_list(divided)]
    assert len({own, *map(tokens_fingerprint, others)}) == 5


def test_too_small_a_disk_is_refused_before_it_starts(
    tmp_path: Path, capture: CountingCapture, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    needed = estimate_bytes(sum(dataset_lengths(make_dataset())), capture)
    usage = namedtuple("usage", "free")
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage(needed - 1))
    with pytest.raises(UserError, match=r"capture\.max_samples, or set capture\.mode=online"):
        _capture(capture, tmp_path)
    assert not hasattr(capture, "batches")
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage(needed))
    _capture(capture, tmp_path)
    assert "GB" in capsys.readouterr().err
    written = HiddenStateStore(tmp_path).manifest["num_bytes"]
    assert written == pytest.approx(needed, rel=0.1)


def test_disk_that_fills_up_keeps_finished_shards(
    tmp_path: Path, capture: CountingCapture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from safetensors.torch import save_file

    def save_first_only(tensors: dict, path: Path) -> None:
        if "00000" not in path.name:
            raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
        save_file(tensors, path)

    monkeypatch.setattr("data.store.save_file", save_first_only)
    with pytest.raises(UserError, match="disk is full"):
        _capture(capture, tmp_path)
    monkeypatch.undo()
    capture.batches = []
    _capture(capture, tmp_path)
    first = plan_shards(dataset_lengths(make_dataset()), SHARD_TOKENS)[0]
    assert len([*chain(*capture.batches)]) == len(make_dataset()) - len(first)


def test_lengths_follow_a_selection() -> None:
    dataset = make_dataset().select([3, 1, 1])
    assert dataset_lengths(dataset) == [len(ids) for ids in dataset["input_ids"]]
