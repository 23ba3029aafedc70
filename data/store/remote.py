"""A finished store in object storage, whose samples are read by byte ranges, through fsspec."""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import fsspec

from data.cache import cache_directory
from data.store.index import INDEX, MANIFEST, file_checksum, read_manifest
from eagle31.credentials import has_url_credentials
from eagle31.errors import UserError
from eagle31.tensor_files import TensorEntry, read_header


@contextmanager
def _requests(url: str) -> Iterator[None]:
    """Name what fails for good: the protocol's package sends a request again where that may help."""
    try:
        yield
    except (FileNotFoundError, UserError):
        raise
    except Exception as error:  # of the protocol's package, whose errors have no common type
        remedy = (
            f"It cannot be read ({type(error).__name__}: {error}); check address and credentials, and run "
            "the same command again."
        )
        raise UserError("capture.store", url, remedy) from error


class RemoteFile:
    """An object that any number of threads can read at any position. It has nothing open."""

    def __init__(self, system: Any, path: str) -> None:
        self.path = path
        self._system = system

    def header(self) -> dict[str, TensorEntry]:
        """Return what `read_header` does; raise what `fill` does."""
        options = {"cache_type": "readahead", "block_size": 1 << 16}
        with _requests(self.path), self._system.open(self.path, "rb", **options) as file:
            return read_header(file, self.path)

    def fill(self, pieces: Sequence[tuple[memoryview, int]]) -> None:
        """Fill memory with the bytes from a position on, all pieces at once.

        Raises:
            OSError: the object is missing or ends before these bytes.
            UserError: the service refuses or does not answer.
        """
        wanted = [(view, position) for view, position in pieces if len(view)]
        starts = [position for _, position in wanted]
        ends = [position + len(view) for view, position in wanted]
        paths = [self.path] * len(wanted)
        with _requests(self.path):
            found = self._system.cat_ranges(paths, starts, ends, on_error="raise")
        for (view, position), content in zip(wanted, found, strict=True):
            if len(content) != len(view):
                raise OSError(f"{self.path} ends at byte {position + len(content)}")
            view[:] = content


def check_protocol(url: str) -> None:
    """Check that stores can be read through a URL's protocol. It sends nothing.

    Raises:
        UserError: the URL has credentials, its protocol is unknown, or its package is not installed.
    """
    if has_url_credentials(url):
        remedy = "Leave them out: credentials come from the variables or files of the protocol's package."
        raise UserError("capture.store", url, f"The URL has credentials. {remedy}")
    try:
        for protocol in url.partition("://")[0].split("::"):
            fsspec.get_filesystem_class(protocol)
    except ImportError as error:
        raise UserError("capture.store", url, f"Reading it needs another package: {error}.") from None
    except ValueError as error:
        raise UserError("capture.store", url, f"{error}; give s3://, gs:// or a directory.") from None


class RemoteDirectory:
    """The files of a store below a URL.

    Credentials, region and endpoint are those that the protocol's package finds by itself: AWS_* variables or
    ~/.aws for s3://, Google's default credentials for gs://.

    Raises:
        UserError: the URL has credentials, its protocol is unknown, or its package is not installed.
    """

    def __init__(self, url: str) -> None:
        check_protocol(url)
        self.url = url.rstrip("/")
        self._system, self._path = fsspec.core.url_to_fs(self.url)

    def file(self, name: str) -> RemoteFile:
        return RemoteFile(self._system, f"{self._path}/{name}")

    def read(self, name: str) -> bytes | None:
        """Return the content of a small file, or None where it is missing.

        Raises:
            UserError: the service refuses or does not answer.
        """
        try:
            with _requests(self.url):
                return self._system.cat_file(f"{self._path}/{name}")
        except FileNotFoundError:
            return None

    def sizes(self) -> dict[str, int]:
        """Return the sizes of the files by name, in bytes; nothing where there is no such directory.

        Raises:
            UserError: the service refuses or does not answer.
        """
        self._system.invalidate_cache(self._path)
        try:
            with _requests(self.url):
                listed = self._system.ls(self._path, detail=True)
        except FileNotFoundError:
            return {}
        return {
            entry["name"].rsplit("/", 1)[-1]: entry["size"] for entry in listed if entry["type"] == "file"
        }


def local_description(remote: RemoteDirectory) -> Path:
    """Return a directory with a copy of the store's manifest and index, which the processes here share.

    Raises:
        UserError: the store is unfinished or cannot be read.
    """
    content = remote.read(MANIFEST)
    if content is None:
        remedy = f"There is no {MANIFEST}: no store, or one that was not copied to its end."
        raise UserError("capture.store", remote.url, remedy)
    directory = cache_directory() / "stores" / hashlib.sha256(content).hexdigest()[:32]
    directory.mkdir(parents=True, exist_ok=True)
    _save(directory / MANIFEST, content)
    manifest, index = read_manifest(directory), directory / INDEX
    assert manifest is not None
    if not index.exists() or file_checksum(index) != manifest["index_checksum"]:
        _save(index, remote.read(INDEX) or b"")
    return directory


def _save(path: Path, content: bytes) -> None:
    partial = path.with_name(f".{path.name}.{uuid4().hex}.partial")
    try:
        partial.write_bytes(content)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
