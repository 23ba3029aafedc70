"""Operations on complete stores: describe, verify, merge and convert."""

import hashlib
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from data.progress import Progress, tracked
from data.store.codec import CODECS, FINAL_STATES, Encoding, Rows, decode, encoded_bytes
from data.store.index import (
    MANIFEST,
    SETTINGS,
    ShardEntry,
    ShardTable,
    build_index,
    claim,
    differing,
    missing_ids,
    read_index,
    read_manifest,
    read_settings,
    write_manifest,
)
from data.store.reader import SampleReader
from data.store.shards import (
    DamagedShard,
    FinishedShards,
    ShardRecord,
    check_content,
    check_sidecar,
    check_size,
    forget_refusals,
    read_sidecar,
    refuse,
    refused,
)
from data.store.writer import StoreWriter, disk_full
from eagle31.errors import UserError, require_positive

SHARD_TOKENS = 1 << 18


@dataclass(frozen=True)
class Contents:
    """The contents of a store's directory, finished or not."""

    directory: Path
    settings: dict[str, Any]  # the target, the dataset and the encoding of the capture
    records: list[ShardRecord]
    refused: dict[int, str]
    missing: list[int]
    finished: bool

    @property
    def encoding(self) -> Encoding:
        return Encoding(**self.settings["encoding"])

    @property
    def is_damaged(self) -> bool:
        """Whether the store was finished and samples are missing: shards or their sidecars are gone."""
        return self.finished and bool(self.missing)

    @staticmethod
    def read(directory: Path) -> "Contents":
        """Read the contents; raise UserError where the directory holds no store, or a sidecar is damaged."""
        settings, records = _read_settings(directory), FinishedShards(directory).records()
        missing = missing_ids(directory, records, settings["dataset_samples"])
        finished = read_manifest(directory) is not None
        return Contents(directory, settings, records, refused(directory), missing, finished)


def retry(directory: Path) -> dict[int, str]:
    """Forget which samples were refused, so that the next run captures them; return their reasons.

    Raises:
        UserError: the directory holds no store.
    """
    forgotten = Contents.read(directory).refused
    if forgotten:
        # First the manifest, which says that the store is finished without them.
        (directory / MANIFEST).unlink(missing_ok=True)
        forget_refusals(directory)
    return forgotten


def _read_settings(directory: Path) -> dict[str, Any]:
    path = directory / SETTINGS
    if not path.exists():
        raise UserError("STORE", directory, f"The directory holds no store: {SETTINGS} is missing.")
    return read_settings(directory)


def damage(directory: Path, progress: bool = False) -> Iterator[UserError]:
    """Read every shard and yield what is wrong with it, with its sidecar or with the index.

    Raises:
        UserError: the directory holds no store.
    """
    _read_settings(directory)
    manifest = read_manifest(directory)
    listed: dict[str, ShardEntry] = {}
    if manifest:
        try:
            listed = {shard.file: shard for shard in ShardTable(read_index(directory, manifest))}
        except DamagedShard as error:
            yield error
    sidecars = {path.with_suffix(".safetensors").name for path in directory.glob("shard-*.json")}
    files = sorted(sidecars | listed.keys())
    for file in tracked(files, "verify", "shards", shown=progress):
        try:
            _check(directory, file, listed.get(file))
        except UserError as error:
            yield error


def _check(directory: Path, file: str, listed: ShardEntry | None) -> None:
    if listed:
        check_size(directory, file, listed.num_bytes)
        check_content(directory, file, listed.checksum, listed.sha256)
    record = read_sidecar((directory / file).with_suffix(".json"))
    if not listed:
        check_size(directory, file, record.num_bytes)
    if not listed or (record.checksum, record.sha256) != (listed.checksum, listed.sha256):
        check_content(directory, file, record.checksum, record.sha256)
    check_sidecar(directory, record)


def merge(
    stores: Sequence[Path], output: Path, shard_tokens: int = SHARD_TOKENS, progress: bool = False
) -> int:
    """Merge several stores into one with shards of one size. A single store gets fewer, larger shards.

    Stores of the same dataset complete each other; where several have a sample, the first store's is taken.
    The ids of another dataset's samples follow those of the datasets before it.

    Returns:
        The number of missing samples. The store is finished when it is zero.

    Raises:
        UserError: the stores were made differently, one is damaged, or the disk cannot hold the result.
    """
    contents = [Contents.read(store) for store in stores]
    datasets: dict[str, int] = {}  # the first id of each one's samples
    num_samples = 0
    for one in contents:
        own = {"tokens_fingerprint", "dataset_samples"}
        changed = sorted(set(differing(contents[0].settings, one.settings)) - own)
        if changed:
            raise UserError(
                "STORE", one.directory, f"Its {', '.join(changed)} differs from that of the first store."
            )
        if one.settings["tokens_fingerprint"] not in datasets:
            datasets[one.settings["tokens_fingerprint"]] = num_samples
            num_samples += one.settings["dataset_samples"]
    settings = contents[0].settings
    if len(datasets) > 1:
        joined = hashlib.sha256(" ".join(datasets).encode()).hexdigest()
        settings = settings | {"tokens_fingerprint": joined, "dataset_samples": num_samples}
    offsets = [datasets[one.settings["tokens_fingerprint"]] for one in contents]
    return _write(contents, offsets, output, settings, shard_tokens, progress)


def convert(
    store: Path,
    output: Path,
    encoding: Encoding,
    shard_tokens: int = SHARD_TOKENS,
    progress: bool = False,
) -> int:
    """Write the same store in an encoding that keeps less. Return and raise what `merge` does.

    Raises:
        UserError: the encoding needs more than the store has.
    """
    contents = Contents.read(store)
    old = contents.encoding
    order = (CODECS, FINAL_STATES)
    for option, names in zip(("codec", "final_states"), order, strict=True):
        has, wants = getattr(old, option), getattr(encoding, option)
        if names.index(wants) < names.index(has):
            remedy = f"The store holds {has} only, and what that left out is lost. Capture again."
            raise UserError(f"--{option.replace('_', '-')}", wants, remedy)
    settings = contents.settings | {"encoding": encoding.to_json()}
    return _write([contents], [0], output, settings, shard_tokens, progress)


def _write(
    sources: Sequence[Contents],
    offsets: Sequence[int],
    output: Path,
    settings: Mapping[str, Any],
    shard_tokens: int,
    progress: bool,
) -> int:
    """Copy what is missing in the output, and resume where an earlier copy stopped.

    Memory holds the samples that the writer has not written yet, and a few arrays with a number per sample.
    """
    require_positive({"--shard-tokens": shard_tokens})
    for source in sources:
        if output.resolve() == source.directory.resolve():
            raise UserError("OUT", output, "This is one of the stores; choose another directory.")
    if output.exists() and not (output / SETTINGS).exists() and any(output.iterdir()):
        raise UserError("OUT", output, "There are other files; choose a new directory.")
    for source in sources:
        # A damaged sample must not get a new, valid checksum. The others are checked as they are read.
        unchecked = [record for record in source.records if record.checksums is None]
        shown = progress and bool(unchecked)
        for record in tracked(unchecked, f"verify {source.directory}", "shards", shown=shown):
            check_content(source.directory, record.file, None, record.sha256)
    claim(output, settings)
    encoding = Encoding(**settings["encoding"])
    records = FinishedShards(output).records()
    missing = np.zeros(settings["dataset_samples"], dtype=bool)
    missing[missing_ids(output, records, len(missing))] = True
    needed = sum(_needed_bytes(source, encoding) for source in sources)
    free = shutil.disk_usage(output).free + sum(record.num_bytes for record in records)
    if needed > free:
        raise disk_full(output, f"Needs {needed / 1e9:.2f} GB where {free / 1e9:.2f} GB are free")
    writer = StoreWriter(output, "merged", encoding, shard_tokens)
    bar = Progress(str(output), int(missing.sum()), "samples", shown=progress)
    with writer, bar:
        for source, offset in zip(sources, offsets, strict=True):
            for sample_id, tensors in _samples(source, missing, offset):
                missing[sample_id] = False
                if encoding == source.encoding:
                    writer.append_encoded(sample_id, tensors)
                else:
                    writer.append(sample_id, decode(tensors))
                bar.update()
    for source, offset in zip(sources, offsets, strict=True):
        for sample_id, reason in source.refused.items():
            if missing[sample_id + offset]:
                refuse(output, "merged", sample_id + offset, reason)
                missing[sample_id + offset] = False
    if not missing.any():
        write_manifest(output, settings)
    return int(missing.sum())


def _samples(
    contents: Contents, wanted: NDArray[np.bool_], offset: int
) -> Iterator[tuple[int, dict[str, Tensor]]]:
    """Yield the samples, as they are encoded, in the order in which the shards have them.

    Args:
        wanted: of each id in the output, whether its sample is to be read.
        offset: what is added to an id of these contents.
    """
    index = build_index(contents.records)
    reader = SampleReader(contents.directory, index)
    for index_row in np.lexsort((index["starts"][:, 0], index["shards"])).tolist():
        sample_id = int(index["sample_ids"][index_row]) + offset
        if wanted[sample_id]:
            yield sample_id, reader.encoded(index_row)


def _needed_bytes(contents: Contents, encoding: Encoding) -> int:
    """Return the largest possible size in another encoding."""
    index = build_index(contents.records)
    if not len(index["sample_ids"]):
        return 0
    states = decode(SampleReader(contents.directory, index).encoded(0)).aux_hidden_states
    tokens, aux, final = index["rows"].sum(axis=0, dtype=int).tolist()
    _, num_layers, hidden_size = states.shape
    return encoded_bytes(encoding, Rows(tokens, aux, final), num_layers, hidden_size, states.dtype)
