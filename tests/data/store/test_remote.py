"""Stores in object storage, read from an S3 server on this machine."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from data.store import HiddenStateStore
from data.store.codec import CODECS, Encoding
from data.store.copying import copy_store
from data.store.index import MANIFEST
from data.store.reader import SampleReader
from data.store.remote import RemoteDirectory
from data.store.sample_cache import CacheSettings
from eagle31.errors import UserError
from tests.data.store.s3 import s3_bucket
from tests.data.store.samples import EXACT, assert_equal, encoded, flip_last_byte, make_version_3, write_store

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    with s3_bucket() as url:
        yield url


@pytest.fixture(autouse=True)
def _fresh(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EAGLE31_CACHE", str(tmp_path_factory.mktemp("cache")))
    # fsspec keeps connections by their arguments, and the address is in the environment.
    fsspec.get_filesystem_class("s3").clear_instance_cache()


def _files(url: str) -> dict[str, int]:
    return RemoteDirectory(url).sizes()


def _replace(url: str, content: bytes) -> None:
    fsspec.filesystem("s3").pipe_file(url, content)


@pytest.mark.parametrize("codec", CODECS)
def test_a_copy_in_object_storage_reads_as_the_store(bucket: str, tmp_path: Path, codec: str) -> None:
    encoding, url = Encoding(codec, "supervised"), f"{bucket}/read-{codec}"
    write_store(tmp_path, encoding)
    assert copy_store(tmp_path, url)[0] == 4
    store = HiddenStateStore(url, num_threads=3, given=True)
    assert store.lengths.tolist() == HiddenStateStore(tmp_path).lengths.tolist()
    assert store.files.tolist() == HiddenStateStore(tmp_path).files.tolist()
    for index, found in zip([6, 0, 6, *range(7)], store.get_many([6, 0, 6, *range(7)]), strict=True):
        assert_equal(found, encoded(index, encoding))
    store.verify(1, 2)


def test_a_copy_resumes_and_its_manifest_comes_last(bucket: str, tmp_path: Path) -> None:
    url = f"{bucket}/resumed"
    write_store(tmp_path)
    copy_store(tmp_path, url)
    # As an interrupted copy leaves it: a shard is missing, another is cut, and there is no manifest.
    files = sorted(
        name for name in _files(url) if name.endswith(".safetensors") and name.startswith("shard-")
    )
    system = fsspec.filesystem("s3")
    system.rm_file(f"{url}/{files[0]}")
    system.pipe_file(f"{url}/{files[1]}", b"cut")
    system.rm_file(f"{url}/{MANIFEST}")
    with pytest.raises(UserError, match=rf"capture\.store={url}: There is no {MANIFEST}"):
        HiddenStateStore(url, given=True)
    assert copy_store(tmp_path, url)[0] == 2
    assert_equal(HiddenStateStore(url, given=True)[3], encoded(3, EXACT))
    assert copy_store(tmp_path, url)[0] == 0


def test_a_damaged_store_is_not_copied(bucket: str, tmp_path: Path) -> None:
    url = f"{bucket}/damaged"
    write_store(tmp_path)
    flip_last_byte(sorted(tmp_path.glob("shard-*.safetensors"))[1])
    with pytest.raises(UserError, match="shard-"):
        copy_store(tmp_path, url)
    assert MANIFEST not in _files(url)


def test_what_is_no_finished_store_is_not_copied(bucket: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"STORE={tmp_path}: It has no {MANIFEST}"):
        copy_store(tmp_path, f"{bucket}/none")
    write_store(tmp_path / "one")
    write_store(tmp_path / "two", Encoding("fp8", "all"))
    for path in (tmp_path / "two").glob("shard-*"):
        path.rename(path.with_name(path.name.replace("shard-", "shard-other")))
    copy_store(tmp_path / "one", str(tmp_path / "out"))
    assert_equal(HiddenStateStore(tmp_path / "out", given=True)[2], encoded(2, EXACT))
    (tmp_path / "out" / "shard-x-00000.json").write_text("{}")
    with pytest.raises(UserError, match=r"OUT=.*It holds another store \(shard-x-00000\.json\)"):
        copy_store(tmp_path / "one", str(tmp_path / "out"))
    with pytest.raises(UserError, match="This is the store itself"):
        copy_store(tmp_path / "one", str(tmp_path / "one"))


@pytest.mark.parametrize("damage", ["altered", "cut", "gone"])
def test_damage_of_the_copy_is_found_and_named(bucket: str, tmp_path: Path, damage: str) -> None:
    url = f"{bucket}/{damage}"
    write_store(tmp_path)
    copy_store(tmp_path, url)
    path = sorted(tmp_path.glob("shard-*.safetensors"))[0]
    if damage == "gone":
        fsspec.filesystem("s3").rm_file(f"{url}/{path.name}")
    else:
        if damage == "altered":
            flip_last_byte(path)
        _replace(f"{url}/{path.name}", path.read_bytes()[: None if damage == "altered" else -9])
    store = HiddenStateStore(url, given=True)
    if damage != "altered":
        with pytest.raises(UserError, match=rf"{path.name} is missing or altered"):
            store.verify()
    with pytest.raises(UserError, match=rf"capture\.store={url}: .*{path.name}.*copy the store again"):
        store.get_many(range(7))


def test_samples_are_kept_on_the_local_disk(bucket: str, tmp_path: Path) -> None:
    url, cache = f"{bucket}/cached", CacheSettings(tmp_path / "cache", 10**9)
    write_store(tmp_path / "store")
    copy_store(tmp_path / "store", url)
    HiddenStateStore(url, cache=cache, given=True).get_many(range(5))
    for name in _files(url):
        if name.startswith("shard-"):
            fsspec.filesystem("s3").rm_file(f"{url}/{name}")
    again = HiddenStateStore(url, cache=cache, num_threads=2, given=True)
    for index, found in enumerate(again.get_many(range(5))):
        assert_equal(found, encoded(index, EXACT))
    with pytest.raises(UserError, match="copy the store again"):
        again[5]  # was never read
    # A damaged file of the cache is not used.
    (file,) = (tmp_path / "cache").glob("*/*/3.safetensors")
    flip_last_byte(file)
    with pytest.raises(UserError, match="copy the store again"):
        again[3]


def test_the_cache_has_a_limit_that_processes_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_store(tmp_path / "store")
    cache = CacheSettings(tmp_path / "cache", 4000, num_processes=2)
    HiddenStateStore(tmp_path / "store", cache=cache).get_many(range(7))
    kept = {path.name: path.stat().st_size for path in (tmp_path / "cache").glob("*/*/*")}
    assert 0 < sum(kept.values()) <= 2000
    assert len(kept) < 7
    # The next process counts what is there, and reads it whoever wrote it.
    reads = []
    whole = SampleReader._open
    monkeypatch.setattr(SampleReader, "_open", lambda self, shard: reads.append(shard) or whole(self, shard))
    store = HiddenStateStore(tmp_path / "store", cache=cache)
    for index, found in enumerate(store.get_many(range(7))):
        assert_equal(found, encoded(index, EXACT))
    assert len(reads) == 7 - len(kept)
    assert sum(path.stat().st_size for path in (tmp_path / "cache").glob("*/*/*")) <= 4000
    # A cache that cannot be written any more costs nothing but time.
    for group in (tmp_path / "cache").glob("*/*"):
        for path in group.iterdir():
            path.unlink()
        group.rmdir()
        group.write_text("in the way")
    full = HiddenStateStore(tmp_path / "store", cache=CacheSettings(tmp_path / "cache", 10**9))
    assert_equal(full[1], encoded(1, EXACT))
    assert_equal(full[2], encoded(2, EXACT))
    assert capsys.readouterr().err.count("no more samples are added") == 1


def test_stores_without_checksums_of_samples_are_not_cached(tmp_path: Path) -> None:
    write_store(tmp_path / "store")
    make_version_3(tmp_path / "store")
    with pytest.raises(UserError, match=r"capture\.cache_dir=.*scripts/store merge"):
        HiddenStateStore(tmp_path / "store", cache=CacheSettings(tmp_path / "cache", 10**9))


def test_missing_packages_and_unreachable_services_are_user_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(UserError, match=r"capture\.store=gs://bucket/store: .*pip install gcsfs"):
        HiddenStateStore("gs://bucket/store")
    with pytest.raises(UserError, match=r"capture\.store=banana://x: .*give s3://"):
        HiddenStateStore("banana://x")
    with pytest.raises(UserError, match="has credentials") as caught:
        HiddenStateStore("s3://key:pass/word@bucket/store")
    assert "word" not in str(caught.value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(UserError, match=r"capture\.store=s3://bucket/x: It cannot be read"):
        HiddenStateStore("s3://bucket/x")


def test_the_command_copies_a_store(bucket: str, tmp_path: Path) -> None:
    url = f"{bucket}/command"
    write_store(tmp_path)
    done = subprocess.run(
        [sys.executable, ROOT / "scripts/store", "copy", tmp_path, url],
        capture_output=True,
        text=True,
        env=os.environ,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert f"capture.store={url}" in done.stdout
    assert_equal(HiddenStateStore(url, given=True)[6], encoded(6, EXACT))
