"""Reads and mends the files of W&B runs: records in the log format of LevelDB, as wandb-core writes them."""

import json
import os
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError
from wandb.proto import wandb_internal_pb2

_IDENTIFIER = b":W&B"
_FILE_HEADER, _BLOCK, _RECORD_HEADER = 7, 32768, 7
_FULL, _FIRST, _LAST = 1, 2, 4


def history(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a run, each with its `_step`. The file ends early where its writer was killed.

    Raises:
        ValueError: the file is not one of W&B's, or it is damaged.
    """
    for content, _ in _records(path.read_bytes()):
        record = wandb_internal_pb2.Record()  # type: ignore[attr-defined]  # made when it is imported
        try:
            record.ParseFromString(content)
            if record.WhichOneof("record_type") == "history":
                items = record.history.item
                row = {one.key or "/".join(one.nested_key): json.loads(one.value_json) for one in items}
                yield row | {"_step": record.history.step.num}
        except (DecodeError, RecursionError, ValueError) as error:
            raise ValueError(f"{path} is damaged: {error}") from error


def last_step(directory: Path, run_id: str) -> int:
    """Return the last step that the files of a run have, below the directory that W&B was given; -1: none.

    Raises:
        ValueError: a file is damaged.
    """
    files = directory.glob(f"wandb/*run-*-{run_id}/run-{run_id}.wandb")
    return max((row["_step"] for file in files for row in history(file)), default=-1)


def mend(directory: Path) -> None:
    """Let `wandb sync` read what killed runs have left, below the directory that W&B was given.

    It refuses a file without a row, or with an incomplete record at its end, and then all files after it.
    """
    for file in directory.glob("wandb/offline-run-*/run-*.wandb"):
        try:
            num_rows = sum(1 for _ in history(file))
        except ValueError:  # It is damaged otherwise, and no kill does that.
            continue
        if num_rows == 0:
            shutil.rmtree(file.parent)
            continue
        *_, (_, end) = _records(file.read_bytes())
        if end < file.stat().st_size:
            os.truncate(file, end)


def _records(content: bytes) -> Iterator[tuple[bytes, int]]:
    """Yield the complete records, each with the position of its end."""
    if content and not content.startswith(_IDENTIFIER):
        raise ValueError("not a file of W&B")
    position, parts = _FILE_HEADER, b""
    while position + _RECORD_HEADER <= len(content):
        left = _BLOCK - position % _BLOCK
        if left < _RECORD_HEADER:  # zeros fill the block
            position += left
            continue
        _, length, kind = struct.unpack_from("<IHB", content, position)
        position += _RECORD_HEADER
        part = content[position : position + length]
        if kind == 0 or len(part) < length:
            return
        parts = part if kind in (_FULL, _FIRST) else parts + part
        position += length
        if kind in (_FULL, _LAST):
            yield parts, position
