"""Hashes of whole files, computed on all cores and remembered in the cache directory until a file changes.

A user can set the modification time back, as `cp -p` does, and replace a file in place with one of the same
size; the time of change (ctime) is set by the kernel alone, at every write.
"""

import hashlib
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from data.cache import cache_directory
from data.locks import lock
from data.progress import tracked
from eagle31.errors import UserError
from eagle31.json_files import write_json

_MAX_THREADS = 32
_REMEMBERED_BYTES = 1 << 28  # fewer bytes are hashed in less than a second
_SHOWN_BYTES = 4 * 10**9
_READ_BYTES = 1 << 22


def hash_files(files: Sequence[Path]) -> list[str]:
    """Return the sha256 of each file's whole content, as 64 hexadecimal digits.

    Where several processes ask for the same large files, one of them reads them and the others wait.

    Args:
        files: in one directory, so that they are remembered together, in the cache.

    Raises:
        UserError: a file changed while it was read.
    """
    paths = [file.resolve() for file in files]
    if sum(path.stat().st_size for path in paths) < _REMEMBERED_BYTES:
        return _hash_missing(paths, {})
    name = hashlib.sha256(str(paths[0].parent).encode()).hexdigest()[:24]
    memory = cache_directory() / "file_hashes" / f"{name}.json"
    memory.parent.mkdir(parents=True, exist_ok=True)
    with lock(memory.with_suffix(".lock")):
        known = json.loads(memory.read_text()) if memory.exists() else {}
        found = _hash_missing(paths, known)
        write_json(memory, known | {_key(path): digest for path, digest in zip(paths, found, strict=True)})
    return found


def _hash_missing(paths: Sequence[Path], known: dict[str, str]) -> list[str]:
    keys = [_key(path) for path in paths]
    missing = [path for path, key in zip(paths, keys, strict=True) if key not in known]
    num_bytes = sum(path.stat().st_size for path in missing)
    shown = num_bytes >= _SHOWN_BYTES
    with ThreadPoolExecutor(_MAX_THREADS) as pool:
        digests = tracked(pool.map(_sha256, missing), "fingerprint", "files", total=len(missing), shown=shown)
        found = dict(zip(missing, digests, strict=True))
    for path, key in zip(paths, keys, strict=True):
        if _key(path) != key:
            raise UserError(
                "file", path, "The file changed while it was read; run again once it is complete."
            )
    return [found[path] if path in found else known[key] for path, key in zip(paths, keys, strict=True)]


def _key(path: Path) -> str:
    status = path.stat()
    return f"{path} {status.st_size} {status.st_ino} {status.st_mtime_ns} {status.st_ctime_ns}"


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while block := file.read(_READ_BYTES):
            digest.update(block)
    return digest.hexdigest()
