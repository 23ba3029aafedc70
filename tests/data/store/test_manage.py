import json
import random
from pathlib import Path

import pytest

from data.store import HiddenStateStore, reader
from data.store.codec import Encoding
from data.store.index import claim, write_manifest
from data.store.manage import Contents, convert, damage, merge
from data.store.shards import FinishedShards, open_shard, refuse
from eagle31.errors import UserError
from tests.data.store.samples import (
    EXACT,
    LENGTHS,
    append_all,
    assert_equal,
    encoded,
    flip_last_byte,
    make_sample,
    settings,
    write_store,
)


def part(directory: Path, ids: list[int], **changes: object) -> Path:
    claim(directory, settings(**changes))
    append_all(directory, ids)
    return directory


def test_parts_of_a_dataset_are_joined_and_the_first_counts(tmp_path: Path) -> None:
    parts = [part(tmp_path / "one", [6, 0, 3]), part(tmp_path / "two", [3, 1, 2])]
    assert merge(parts, tmp_path / "out") == 2
    with pytest.raises(UserError, match="unfinished"):
        HiddenStateStore(tmp_path / "out")
    refuse(parts[0], "a", 4, "no")
    parts.append(part(tmp_path / "three", [5]))
    assert merge(parts, tmp_path / "out") == 0
    store = HiddenStateStore(tmp_path / "out")
    assert store.sample_ids.tolist() == [0, 1, 2, 3, 5, 6]
    for sample_id, sample in zip(store.sample_ids.tolist(), store.get_many(range(6)), strict=True):
        assert_equal(sample, make_sample(sample_id))
    assert store.manifest["refused"] == [{"sample_id": 4, "reason": "no"}]
    assert store.manifest["tokens_fingerprint"] == "abc"


def test_ids_of_another_datasets_samples_follow(tmp_path: Path) -> None:
    write_store(tmp_path / "one", Encoding("fp8"))
    write_store(tmp_path / "two", Encoding("fp8"), tokens_fingerprint="def")
    assert merge([tmp_path / "one", tmp_path / "two"], tmp_path / "out") == 0
    store = HiddenStateStore(tmp_path / "out")
    assert store.lengths.tolist() == LENGTHS * 2
    assert store.manifest["dataset_samples"] == 14
    assert store.manifest["tokens_fingerprint"] not in ("abc", "def")
    for i, sample in enumerate(store.get_many(range(14))):
        assert_equal(sample, encoded(i % 7, Encoding("fp8")))


def test_small_shards_of_one_store_become_large_ones(tmp_path: Path) -> None:
    write_store(tmp_path / "one")
    assert merge([tmp_path / "one"], tmp_path / "out") == 0
    store = HiddenStateStore(tmp_path / "out")
    assert len(store.shards) == 1
    for i in range(7):
        assert_equal(store[i], make_sample(i))


def test_stores_that_were_made_differently_are_not_merged(tmp_path: Path) -> None:
    one = part(tmp_path / "one", [0])
    for field, value in {"target": "other", "aux_layer_ids": [0, 1], "dtype": "float32"}.items():
        other = part(tmp_path / field, [1], **{field: value})
        with pytest.raises(UserError, match=f"Its {field} differs from that of the first"):
            merge([one, other], tmp_path / "out")
    with pytest.raises(UserError, match="Its encoding differs from that of the first"):
        merge([one, part(tmp_path / "fp8", [1], encoding=Encoding("fp8"))], tmp_path / "out")
    with pytest.raises(UserError, match="holds no store"):
        merge([one, tmp_path / "nothing"], tmp_path / "out")
    with pytest.raises(UserError, match="is one of the stores"):
        merge([one], one)
    assert not (tmp_path / "out").exists()


def test_damaged_samples_are_not_copied(tmp_path: Path) -> None:
    write_store(tmp_path / "one")
    flip_last_byte(tmp_path / "one" / "shard-b-00000.safetensors")
    with pytest.raises(UserError, match=r"shard-b-00000\.safetensors"):
        merge([tmp_path / "one"], tmp_path / "out")


def test_a_merge_opens_each_shard_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    claim(tmp_path / "many", settings(300))
    append_all(tmp_path / "many", random.Random(0).sample(range(300), 300), shard_tokens=10)
    num_shards = len(FinishedShards(tmp_path / "many").records())
    assert num_shards > 128  # more than a reader keeps open
    opened = []
    monkeypatch.setattr(reader, "open_shard", lambda path: opened.append(path) or open_shard(path))
    assert merge([tmp_path / "many"], tmp_path / "out", shard_tokens=500) == 0
    assert len(opened) <= num_shards + 1  # one for the size of a state
    store = HiddenStateStore(tmp_path / "out")
    assert len(store.shards) < num_shards / 20
    for sample_id in range(300):
        assert_equal(store[sample_id], make_sample(sample_id))


def test_the_output_is_a_new_directory_and_shards_hold_tokens(tmp_path: Path) -> None:
    write_store(tmp_path / "one")
    (tmp_path / "out").mkdir()
    assert merge([tmp_path / "one"], tmp_path / "out") == 0  # empty
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match=r"^OUT=.*files: There are other files"):
        convert(tmp_path / "one", tmp_path / "files", Encoding("fp8"))
    assert [path.name for path in (tmp_path / "files").iterdir()] == ["notes.txt"]
    with pytest.raises(UserError, match=r"^--shard-tokens=0: It must be greater than 0"):
        merge([tmp_path / "one"], tmp_path / "other", shard_tokens=0)
    assert not (tmp_path / "other").exists()


def test_converted_is_as_if_captured_so(tmp_path: Path) -> None:
    write_store(tmp_path / "exact")
    for encoding in (Encoding("bf16", "all"), Encoding("fp8", "supervised")):
        assert convert(tmp_path / "exact", tmp_path / encoding.codec, encoding) == 0
        store = HiddenStateStore(tmp_path / encoding.codec)
        assert store.manifest["encoding"] == encoding.to_json()
        for i in range(7):
            assert_equal(store[i], encoded(i, encoding))
    assert convert(tmp_path / "bf16", tmp_path / "again", Encoding("fp8")) == 0


def test_converting_restores_nothing(tmp_path: Path) -> None:
    write_store(tmp_path / "fp8", Encoding("fp8", "supervised"))
    for encoding, field in (
        (Encoding("bf16", "supervised"), "--codec"),
        (Encoding("fp8", "all"), "--final-states"),
    ):
        with pytest.raises(UserError, match=f"{field}=.*left out is lost"):
            convert(tmp_path / "fp8", tmp_path / "out", encoding)
    assert not (tmp_path / "out").exists()


def test_an_interrupted_conversion_resumes(tmp_path: Path) -> None:
    encoding = Encoding("fp8", "all")
    write_store(tmp_path / "exact")
    claim(tmp_path / "out", settings(encoding=encoding))
    append_all(tmp_path / "out", [0, 1, 2], "merged", encoding)
    before = {path: path.read_bytes() for path in (tmp_path / "out").glob("shard-merged-00000*")}
    assert convert(tmp_path / "exact", tmp_path / "out", encoding) == 0
    assert {path: path.read_bytes() for path in before} == before
    assert sum(len(record.sample_ids) for record in Contents.read(tmp_path / "out").records) == 7
    assert_equal(HiddenStateStore(tmp_path / "out")[1], encoded(1, encoding))


def test_every_kind_of_damage_is_named(tmp_path: Path) -> None:
    write_store(tmp_path)
    assert not list(damage(tmp_path))
    first, second = "shard-a-00000", "shard-b-00000"
    sidecar = json.loads((tmp_path / f"{first}.json").read_text())
    (tmp_path / f"{first}.json").write_text(json.dumps(sidecar | {"sample_ids": sidecar["sample_ids"][::-1]}))
    flip_last_byte(tmp_path / f"{second}.safetensors")
    flip_last_byte(tmp_path / "index.safetensors")
    found = list(damage(tmp_path))
    assert [Path(error.field).name for error in found] == [
        "index.safetensors",
        f"{first}.safetensors",
        f"{second}.safetensors",
    ]
    assert "name other samples" in found[1].remedy
    (tmp_path / f"{first}.safetensors").unlink()
    assert "gone" in list(damage(tmp_path))[1].remedy
    (tmp_path / "manifest.json").unlink()
    assert len(list(damage(tmp_path))) == 2  # unfinished: by the sidecars


def test_contents_of_an_unfinished_store(tmp_path: Path) -> None:
    directory = part(tmp_path / "one", [4, 2])
    contents = Contents.read(directory)
    assert not contents.finished
    assert contents.missing == [0, 1, 3, 5, 6]
    assert contents.encoding == EXACT
    append_all(directory, contents.missing)
    write_manifest(directory, contents.settings)
    assert Contents.read(directory).finished
