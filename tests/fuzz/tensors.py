"""Readers of checkpoints and exports: tensors in files, and what describes them."""

import json
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file

from data.target.checkpoint import Checkpoint
from eagle31.export.layouts import read_raw_config, read_tensors
from eagle31.export.published_config import read_config
from eagle31.export.verification import read_probe, read_record
from eagle31.json_files import read_json
from eagle31.tensor_files import load_pickled_tensors, load_tensors, map_tensors, read_header
from tests.fuzz.reader import DOCUMENTED, Reader, readers_of
from tests.train.drafter.tiny_export import save_target_with_tokenizer, write_tiny_export
from train.checkpoint.parts import (
    MANIFEST,
    DamagedCheckpoint,
    SavedFragment,
    SavedParts,
    load_weights,
    read_checked,
    write_checked,
    write_part,
)

PART = "part-0.safetensors"


def tensor_readers(directory: Path) -> dict[str, Reader]:
    """Return the readers of tensors, the checkpoint of a target, and an export."""
    with tempfile.TemporaryDirectory() as scratch:
        spec = save_target_with_tokenizer(Path(scratch) / "target")
        write_tiny_export(directory, spec)
    tensors = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(3, dtype=torch.bool)}
    save_file(tensors, directory / "file", {"format": "pt"})
    torch.save(tensors, directory / "file.bin")
    split = directory / "split"
    split.mkdir()
    save_file({"a": tensors["a"]}, split / "a.safetensors")
    index = {"metadata": {}, "weight_map": {"a": "a.safetensors"}}
    (split / "model.safetensors.index.json").write_text(json.dumps(index))
    return readers_of(
        directory,
        {
            "header": ("file", _header),
            "tensors": ("file", lambda d: load_tensors(d / "file")),
            "mapped": ("file", lambda d: map_tensors(d / "file")),
            "pickled": ("file.bin", lambda d: load_pickled_tensors(d / "file.bin")),
            "config": ("config.json", lambda d: read_config(read_raw_config(d), num_target_layers=6)),
            "record": ("verification/record.json", read_record),
            "probe": ("verification/probe.safetensors", read_probe),
            "index": ("split/model.safetensors.index.json", lambda d: read_tensors(d / "split")),
            "target_index": ("split/model.safetensors.index.json", _target),
        },
    )


def _header(directory: Path) -> object:
    with (directory / "file").open("rb") as file:
        return read_header(file, "file")


def _target(directory: Path) -> object:
    target = Checkpoint(str(directory / "split"))
    target.check_files(texts=True)
    return [target.read_tensor(file, name) for name, file in target.tensor_files().items()]


def checkpoint_readers(directory: Path) -> dict[str, Reader]:
    """Return the readers of a training's checkpoint: its manifest, whatever its checksum, and its parts."""
    checkpoint = directory / "checkpoint"
    checkpoint.mkdir()
    weight = torch.arange(6.0)
    fragments = [SavedFragment("weights", "a", 0, weight[:4]), SavedFragment("weights", "a", 4, weight[4:])]
    files = {PART: write_part(checkpoint / PART, fragments)}
    write_checked(checkpoint / MANIFEST, {"weights": {"a": [2, 3]}, "files": files, "optimizer_steps": {}})
    return readers_of(
        directory,
        {
            "checkpoint": (f"checkpoint/{MANIFEST}", lambda d: load_weights(d / "checkpoint")),
            "checkpoint_sealed": (f"checkpoint/{MANIFEST}", _sealed_manifest),
            "checkpoint_part": (f"checkpoint/{PART}", lambda d: _read_parts(d / "checkpoint")),
        },
        (*DOCUMENTED, DamagedCheckpoint),
    )


def _sealed_manifest(directory: Path) -> object:
    """Read a manifest that has the right checksum, as somebody who changed it would write it."""
    path = directory / "checkpoint" / MANIFEST
    content = read_json(path)
    if isinstance(content, dict):
        content.pop("crc32", None)
        write_checked(path, content)
    return load_weights(directory / "checkpoint")


def _read_parts(checkpoint: Path) -> object:
    read_checked(checkpoint / MANIFEST)
    parts, values = SavedParts(checkpoint), torch.empty(6)
    parts.read("weights", "a", 0, values)
    return values
