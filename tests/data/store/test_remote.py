"""A finished store in object storage, which any tool has copied there."""

from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from data.store import HiddenStateStore
from data.store.codec import CODECS
from data.store.remote import RemoteDirectory
from eagle31.errors import UserError
from tests.data.store.s3 import s3_bucket
from tests.data.store.samples import LENGTHS, assert_equal, encoded, flip_last_byte, write_store


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    with s3_bucket() as url:
        yield url


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EAGLE31_CACHE", str(tmp_path / "cache"))


def upload(store: Path, url: str) -> None:
    fsspec.filesystem("s3").put(f"{store}/", url, recursive=True)


@pytest.mark.parametrize("codec", CODECS)
def test_a_store_is_read_from_object_storage(tmp_path: Path, bucket: str, codec: str) -> None:
    write_store(tmp_path / "store", codec)
    url = f"{bucket}/{codec}"
    upload(tmp_path / "store", url)
    store = HiddenStateStore(url, num_threads=3)
    assert store.lengths.tolist() == LENGTHS
    for index, sample in enumerate(store.get_many(range(7))):
        assert_equal(sample, encoded(index, codec))
    store.verify()


def test_a_shard_that_is_gone_or_altered_is_named(tmp_path: Path, bucket: str) -> None:
    write_store(tmp_path / "store")
    flip_last_byte(tmp_path / "store" / "shard-b-00000.safetensors")
    url = f"{bucket}/damaged"
    upload(tmp_path / "store", url)
    store = HiddenStateStore(url, given=True)
    with pytest.raises(UserError, match=r"capture\.store=.*shard-b-00000.*copy the store again"):
        store.get_many(range(7))
    fsspec.filesystem("s3").rm(f"{url}/shard-a-00000.safetensors")
    with pytest.raises(UserError, match=r"capture\.store=.*shard-a-00000.*copy the store again"):
        store.verify()


def test_what_the_service_fails_to_answer_is_named(
    tmp_path: Path, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_store(tmp_path / "store")
    url = f"{bucket}/slow"
    upload(tmp_path / "store", url)
    store = HiddenStateStore(url, given=True)
    assert_equal(store[5], encoded(5))  # its shard is open

    async def failing(*arguments: object, **options: object) -> bytes:
        raise OSError(16, "Please reduce your request rate.")

    monkeypatch.setattr(fsspec.filesystem("s3"), "_cat_file", failing)
    with pytest.raises(UserError, match=r"reduce your request rate.*run the same command again") as named:
        store[5]
    assert named.value.field == "capture.store"


@pytest.mark.parametrize("file", ["index.npy", "manifest.json"])
def test_a_damaged_copy_of_the_index_is_fetched_again(tmp_path: Path, bucket: str, file: str) -> None:
    write_store(tmp_path / "store")
    url = f"{bucket}/index"
    upload(tmp_path / "store", url)
    first = HiddenStateStore(url)
    flip_last_byte(first.directory / file)
    assert_equal(HiddenStateStore(url)[3], first[3])


def test_what_is_no_store_is_refused(tmp_path: Path, bucket: str) -> None:
    with pytest.raises(UserError, match="no store"):
        HiddenStateStore(f"{bucket}/nothing")
    with pytest.raises(UserError, match=r"nowhere://"):
        RemoteDirectory("nowhere://bucket")
    with pytest.raises(UserError) as refused:
        RemoteDirectory("s3://key:secret@bucket/store")
    assert "secret" not in str(refused.value)
