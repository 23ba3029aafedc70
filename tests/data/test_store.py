import json
from pathlib import Path

import pytest
import torch

from data.samples import CapturedSample
from data.store import (
    DamagedShard,
    HiddenStateStore,
    finished_shards,
    missing_shards,
    plan_shards,
    write_manifest,
    write_shard,
)
from eagle31.errors import UserError

LENGTHS = [5, 9, 3, 14, 2, 2, 8]
SHARD_TOKENS = 15


def _sample(index: int) -> CapturedSample:
    generator = torch.Generator().manual_seed(index)
    length = LENGTHS[index]
    return CapturedSample(
        input_ids=torch.randint(100_000, (length,), generator=generator),
        loss_mask=torch.rand(length, generator=generator) < 0.5,
        aux_hidden_states=torch.randn(length, 3, 8, generator=generator).bfloat16(),
        last_hidden_states=torch.randn(length, 8, generator=generator).bfloat16(),
    )


def _write_store(directory: Path) -> None:
    for index, shard in enumerate(plan_shards(LENGTHS, SHARD_TOKENS)):
        write_shard(directory, index, [_sample(i) for i in shard])
    write_manifest(directory, {"target": "t", "aux_layer_ids": [0, 1, 2]})


def _assert_equal(found: CapturedSample, wanted: CapturedSample) -> None:
    for name, tensor in vars(wanted).items():
        assert getattr(found, name).dtype == tensor.dtype
        assert torch.equal(getattr(found, name), tensor), name


def test_plan_covers_every_sample_in_order() -> None:
    plan = plan_shards(LENGTHS, SHARD_TOKENS)
    assert [i for shard in plan for i in shard] == list(range(len(LENGTHS)))
    assert plan == [range(0, 2), range(2, 3), range(3, 4), range(4, 7)]
    assert plan_shards([20, 1], 10) == [range(0, 1), range(1, 2)]  # longer than a shard: alone
    assert plan_shards([], 10) == []


def test_read_back_what_was_written(tmp_path: Path) -> None:
    _write_store(tmp_path)
    store = HiddenStateStore(tmp_path)
    assert len(store) == len(LENGTHS)
    assert store.lengths == LENGTHS
    assert store.manifest["target"] == "t"
    assert store.manifest["num_tokens"] == sum(LENGTHS)
    for i in range(len(LENGTHS)):
        _assert_equal(store[i], _sample(i))
    for found, i in zip(store.get_many([6, 0, 6]), [6, 0, 6], strict=True):
        _assert_equal(found, _sample(i))
    store.verify()
    assert not list(tmp_path.glob("*.tmp*"))


def test_unfinished_store_is_refused(tmp_path: Path) -> None:
    write_shard(tmp_path, 0, [_sample(0)])
    with pytest.raises(UserError, match="unfinished"):
        HiddenStateStore(tmp_path)


def test_flipped_byte_is_found_by_verify_and_named(tmp_path: Path) -> None:
    _write_store(tmp_path)
    path = tmp_path / "shard-00002.safetensors"
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)
    store = HiddenStateStore(tmp_path)
    with pytest.raises(DamagedShard, match=r"shard-00002\.safetensors.*sha256.*delete it and run again"):
        store.verify()
    store.verify(rank=1, world_size=2)  # shards 1 and 3
    with pytest.raises(UserError, match="shard-00002"):
        store.verify(rank=0, world_size=2)


@pytest.mark.parametrize("remove", [True, False])
def test_missing_or_cut_shard_is_found_at_open(tmp_path: Path, remove: bool) -> None:
    _write_store(tmp_path)
    path = tmp_path / "shard-00001.safetensors"
    path.unlink() if remove else path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DamagedShard, match=r"shard-00001\.safetensors=.*(gone|bytes); run again"):
        HiddenStateStore(tmp_path)
    assert missing_shards(tmp_path, LENGTHS, SHARD_TOKENS) == [1]


def test_a_shard_without_sidecar_does_not_exist(tmp_path: Path) -> None:
    _write_store(tmp_path)
    (tmp_path / "shard-00003.json").unlink()
    assert sorted(finished_shards(tmp_path)) == [0, 1, 2]


def test_a_write_that_fails_leaves_no_finished_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def save_half(tensors: dict, path: Path) -> None:
        path.write_bytes(b"half")
        raise OSError("disk full")

    write_shard(tmp_path, 0, [_sample(0)])
    monkeypatch.setattr("data.store.save_file", save_half)
    for index in (0, 1):
        with pytest.raises(OSError, match="disk full"):
            write_shard(tmp_path, index, [_sample(1)])
    assert finished_shards(tmp_path) == {}
    assert not list(tmp_path.glob("*.tmp*"))


def test_shards_of_other_samples_are_refused(tmp_path: Path) -> None:
    _write_store(tmp_path)
    with pytest.raises(UserError, match=r"shard-00000\.safetensors there holds other samples"):
        missing_shards(tmp_path, [6, *LENGTHS[1:]], SHARD_TOKENS)
    with pytest.raises(UserError, match="holds other samples"):
        missing_shards(tmp_path, LENGTHS[:3], SHARD_TOKENS)


def test_manifest_lists_the_shards_with_their_checksums(tmp_path: Path) -> None:
    _write_store(tmp_path)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    sidecars = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("shard-*.json"))]
    assert manifest["shards"] == sidecars
