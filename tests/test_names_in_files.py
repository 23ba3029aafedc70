"""A name in a file cannot lead out of the directory that it is for."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from data.store.codec import Encoding
from data.store.index import ShardTable
from data.store.shards import read_sidecar
from data.target.checkpoint import Checkpoint
from eagle31.errors import UserError
from eagle31.export.layouts import read_tensors
from eagle31.json_files import file_within, write_json
from train.checkpoint.parts import DamagedCheckpoint, read_checked, write_checked
from train.trainer.continuation import _take_over_best

NAMES = ["../secret.safetensors", "/etc/passwd", "a/../../secret.safetensors", "", ".", "..", "a\0b", None, 3]


@pytest.mark.parametrize("name", NAMES)
def test_a_name_that_leaves_its_directory_is_refused(tmp_path: Path, name: object) -> None:
    with pytest.raises(UserError, match="which is no file inside"):
        file_within(tmp_path, name, tmp_path / "names.json")


def test_a_name_inside_stays(tmp_path: Path) -> None:
    assert file_within(tmp_path, "model-1.safetensors", tmp_path) == tmp_path / "model-1.safetensors"
    assert file_within(tmp_path, "part/a..b", tmp_path) == tmp_path / "part" / "a..b"


@pytest.fixture
def inside(tmp_path: Path) -> Path:
    """A directory, next to a file of tensors that it does not have."""
    save_file({"fc.weight": torch.ones(2, 2)}, tmp_path / "secret.safetensors")
    directory = tmp_path / "directory"
    directory.mkdir()
    return directory


def weights_of_a_target(directory: Path, name: str) -> object:
    write_json(directory / "config.json", {"model_type": "llama"})
    write_json(directory / "model.safetensors.index.json", {"weight_map": {"fc.weight": name}})
    return Checkpoint(str(directory)).tensor_files()


def weights_of_an_export(directory: Path, name: str) -> object:
    write_json(directory / "model.safetensors.index.json", {"weight_map": {"fc.weight": name}})
    return read_tensors(directory)


def files_of_a_checkpoint(directory: Path, name: str) -> object:
    write_checked(directory / "manifest.json", {"files": {name: {}}})
    return read_checked(directory / "manifest.json")


def best_weights(directory: Path, name: str) -> object:
    write_json(directory / "checkpoints/best/best.json", {"step": 3, "files": {"drafter": name}})

    class Earlier:
        pass

    earlier = Earlier()
    earlier.directory = directory  # type: ignore[attr-defined]
    return _take_over_best(earlier, 3, directory / "own/best")  # type: ignore[arg-type]


def shard_of_a_sidecar(directory: Path, name: str) -> object:
    content = {"file": name, "num_bytes": 1, "encoding": Encoding().to_json(), "sample_ids": [], "sha256": ""}
    content |= {"lengths": [], "aux_rows": [], "last_rows": []}
    (directory / "shard-0-00000.json").write_text(json.dumps(content))
    return read_sidecar(directory / "shard-0-00000.json")


def shard_of_an_index(directory: Path, name: str) -> object:
    return ShardTable({"shard_files": np.frombuffer(name.encode(), np.uint8)[None]}).file(0)


@pytest.mark.parametrize(
    "read",
    [
        weights_of_a_target,
        weights_of_an_export,
        files_of_a_checkpoint,
        best_weights,
        shard_of_a_sidecar,
        shard_of_an_index,
    ],
)
@pytest.mark.parametrize("name", ["../secret.safetensors", "/secret.safetensors"])
def test_each_reader_refuses_it(inside: Path, read: Callable[[Path, str], object], name: str) -> None:
    before = {path: path.stat().st_nlink for path in inside.parent.glob("*.safetensors")}
    with pytest.raises((UserError, DamagedCheckpoint)):
        read(inside, name)
    assert {path: path.stat().st_nlink for path in inside.parent.rglob("*.safetensors")} == before


@pytest.mark.parametrize("name", ["shard-../../x-00000.safetensors", "shard-a/b-00000.safetensors"])
def test_a_writers_name_has_no_slash(inside: Path, name: str) -> None:
    for read in (shard_of_a_sidecar, shard_of_an_index):
        with pytest.raises(UserError):
            read(inside, name)
