import os
import random
from pathlib import Path

import pytest
from safetensors.torch import load_file

from data.store import DamagedShard, HiddenStateStore, reader
from data.store.codec import CODECS
from data.store.index import claim, describes, missing_ids, write_manifest
from data.store.shards import FinishedShards, ShardFile
from eagle31.errors import UserError
from tests.data.store.samples import (
    LENGTHS,
    append_all,
    assert_equal,
    encoded,
    flip_last_byte,
    make_sample,
    settings,
    write_store,
)


@pytest.mark.parametrize("codec", CODECS)
def test_samples_come_in_one_order_whoever_wrote_them(tmp_path: Path, codec: str) -> None:
    write_store(tmp_path, codec)
    store = HiddenStateStore(tmp_path)
    assert len(store) == len(LENGTHS)
    assert store.lengths.tolist() == LENGTHS
    assert store.sample_ids.tolist() == list(range(7))
    for i, found in zip([6, 0, 6, *range(7)], store.get_many([6, 0, 6, *range(7)]), strict=True):
        assert_equal(found, encoded(i, codec))
    store.verify()


def test_a_shard_is_plain_safetensors(tmp_path: Path) -> None:
    append_all(tmp_path, [0, 2], codec="fp8")
    tensors = load_file(tmp_path / "shard-a-00000.safetensors")
    assert tensors["sample_ids"].tolist() == [0, 2]
    assert tensors["rows"][:, 0].tolist() == [5, 3]
    assert tensors["input_ids"][5:].tolist() == make_sample(2).input_ids.tolist()
    assert tensors["aux_hidden_states"].shape == (int(tensors["rows"][:, 1].sum()), 3, 8)


def test_a_sample_that_two_shards_hold_is_the_first_ones(tmp_path: Path) -> None:
    append_all(tmp_path, [2, 1], "b")
    append_all(tmp_path, [0, 1, 3, 4, 5, 6], "a")
    flip_last_byte(tmp_path / "shard-b-00000.safetensors")  # in the mask of its sample 1
    write_manifest(FinishedShards(tmp_path), settings())
    store = HiddenStateStore(tmp_path)
    assert store.manifest["num_samples"] == 7
    assert store.manifest["num_tokens"] == sum(LENGTHS)
    for index in range(7):
        assert_equal(store[index], encoded(index))


def test_unfinished_store_is_refused(tmp_path: Path) -> None:
    append_all(tmp_path, [0])
    with pytest.raises(DamagedShard, match="the same command captures it"):
        HiddenStateStore(tmp_path)
    with pytest.raises(UserError, match=r"^capture\.store=.*unfinished"):
        HiddenStateStore(tmp_path, given=True)


def test_an_altered_sample_is_found_when_it_is_read(tmp_path: Path) -> None:
    write_store(tmp_path)
    path = tmp_path / "shard-b-00000.safetensors"  # of samples 5 and 3, whose mask comes last
    flip_last_byte(path)
    store = HiddenStateStore(tmp_path)
    store.verify()
    for index in (0, 1, 2, 4, 5, 6):
        assert_equal(store[index], encoded(index))
    with pytest.raises(
        DamagedShard, match=r"shard-b-00000\.safetensors=sample 3: The sample was altered.*delete the shard"
    ):
        store[3]


def test_a_shard_that_is_cut_while_it_is_read_is_named(tmp_path: Path) -> None:
    write_store(tmp_path)
    store = HiddenStateStore(tmp_path)
    assert_equal(store[3], encoded(3))
    path = tmp_path / "shard-b-00000.safetensors"
    os.truncate(path, path.stat().st_size - 40)
    with pytest.raises(DamagedShard, match=r"shard-b-00000\.safetensors=sample 3.*ends at byte"):
        store.get_many(range(7))


def test_few_shards_are_open_at_a_time_and_threads_share_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    claim(tmp_path, settings(60))
    append_all(tmp_path, range(60), shard_tokens=1)
    write_manifest(FinishedShards(tmp_path), settings(60))
    monkeypatch.setattr(reader, "_MAX_OPEN_SHARDS", 2)
    store = HiddenStateStore(tmp_path, num_threads=4)
    before = len(os.listdir("/proc/self/fd"))
    order = random.Random(0).choices(range(60), k=400)
    for index, sample in zip(order, store.get_many(order), strict=True):
        assert_equal(sample, encoded(index))
    assert len(os.listdir("/proc/self/fd")) - before <= 3  # two shards, and the listing itself


@pytest.mark.parametrize("remove", [True, False])
def test_missing_or_cut_shard_is_found_before_training_and_only_its_samples_are_missing(
    tmp_path: Path, remove: bool
) -> None:
    write_store(tmp_path)
    path = tmp_path / "shard-a-00000.safetensors"
    lost = ShardFile(path).record().sample_ids
    path.unlink() if remove else path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DamagedShard, match=r"shard-a-00000\.safetensors=.*(gone|bytes)"):
        HiddenStateStore(tmp_path).verify()
    assert set(missing_ids(tmp_path, FinishedShards(tmp_path).records(), 7)) == set(lost)


@pytest.mark.parametrize("name", ["../a/shard-a-00000.safetensors", "shard-../../b-00000.safetensors", "/x"])
def test_a_manifest_names_files_of_the_store_only(tmp_path: Path, name: str) -> None:
    write_store(tmp_path / "store")
    manifest = tmp_path / "store" / "manifest.json"
    manifest.write_text(manifest.read_text().replace("shard-a-00000.safetensors", name))
    with pytest.raises(UserError, match="is no name of a shard"):
        HiddenStateStore(tmp_path / "store")


@pytest.mark.parametrize("damage", ["gone", "altered"])
def test_damaged_index_is_found_at_open(tmp_path: Path, damage: str) -> None:
    write_store(tmp_path)
    path = tmp_path / "index.npy"
    path.unlink() if damage == "gone" else flip_last_byte(path)
    with pytest.raises(DamagedShard, match=r"index\.npy.*makes it again"):
        HiddenStateStore(tmp_path)
    assert not describes(tmp_path, settings())
    write_manifest(FinishedShards(tmp_path), settings())
    assert_equal(HiddenStateStore(tmp_path)[4], encoded(4))
