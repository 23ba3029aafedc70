import json
import math
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from eagle31.errors import UserError
from train.distributed import World
from train.trainer.checkpoint_files import (
    MANIFEST,
    STATE,
    DamagedCheckpoint,
    SavedFragment,
    SavedParts,
    load_weights,
    write_checked,
    write_part,
)
from train.trainer.checkpoints import CheckpointDirectory, TrainState

SHAPES = {"fc.weight": [6, 5], "norm.weight": [7], "layers.0.mlp.up_proj.weight": [4, 3]}
KINDS = ("weights", "exp_avg")


def values(kind: str, name: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(hash((KINDS.index(kind), math.prod(SHAPES[name]))))
    return torch.randn(SHAPES[name], generator=generator)


def write_checkpoint(checkpoint: Path, num_parts: int) -> None:
    """Write the tensors as `num_parts` ranks do."""
    checkpoint.mkdir(parents=True)
    files = {}
    for part in range(num_parts):
        fragments = []
        for name in SHAPES:
            for kind in KINDS:
                flat = values(kind, name).flatten()
                begin, end = (len(flat) * index // num_parts for index in (part, part + 1))
                fragments.append(SavedFragment(kind, name, begin, flat[begin:end]))
        file = f"part-{part:05d}.safetensors"
        files[file] = write_part(checkpoint / file, fragments)
        assert files[file]["bytes"] == (checkpoint / file).stat().st_size
    manifest = {"files": files, "weights": SHAPES, "optimizer_steps": {"w": 1.0}}
    write_checked(checkpoint / MANIFEST, manifest)
    step = int(checkpoint.name.removeprefix("step-"))
    write_checked(checkpoint / STATE, asdict(TrainState(step)) | {"world_size": num_parts})


@pytest.mark.parametrize("num_parts", [1, 2, 5])
def test_any_elements_are_read_whoever_wrote_them(tmp_path: Path, num_parts: int) -> None:
    checkpoint = tmp_path / "step-00000001"
    write_checkpoint(checkpoint, num_parts)
    for kind in KINDS:
        for name, tensor in load_weights(checkpoint, kind).items():
            assert torch.equal(tensor, values(kind, name))
    parts, expected = SavedParts(checkpoint), values("exp_avg", "fc.weight").flatten()
    for start in range(30):
        for stop in range(start, 31):
            read = torch.full((stop - start,), math.nan)
            parts.read("exp_avg", "fc.weight", start, read)
            assert torch.equal(read, expected[start:stop])
    assert parts.kinds("norm.weight") == ["exp_avg", "weights"]
    with pytest.raises(DamagedCheckpoint, match=r"exp_avg of fc\.weight: 2 of 3 elements are there"):
        parts.read("exp_avg", "fc.weight", 28, torch.empty(3))
    # Other readers of safetensors read the parts, too.
    first = load_file(checkpoint / "part-00000.safetensors")
    assert torch.equal(first["weights/norm.weight/0"], values("weights", "norm.weight")[: 7 // num_parts])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3])


def change_number(path: Path) -> None:
    content = json.loads(path.read_text())
    content["supervised_positions"] += 1
    path.write_text(json.dumps(content))


DAMAGE: list[tuple[str, Callable[[Path], Any], str]] = [
    ("part-00001.safetensors", flip, "is not as it was written: its checksum differs"),
    ("part-00001.safetensors", cut, "bytes were written"),
    (MANIFEST, Path.unlink, "is missing"),
    (STATE, change_number, "its checksum differs"),
]


@pytest.mark.parametrize("number", range(len(DAMAGE)), ids=lambda n: f"{DAMAGE[n][0]} {n}")
def test_a_damaged_file_is_named(tmp_path: Path, number: int) -> None:
    file, damage, reason = DAMAGE[number]
    checkpoint = tmp_path / "step-00000003"
    write_checkpoint(checkpoint, 2)
    damage(checkpoint / file)
    (tmp_path / "step-00000003-copy").mkdir()  # a user's
    if file != STATE:
        with pytest.raises(DamagedCheckpoint, match=file):
            load_weights(checkpoint)
    saved = CheckpointDirectory(tmp_path, 1, World(0, 0, 1))
    with pytest.raises(UserError, match="Every checkpoint of this training is damaged") as refused:
        saved.resume(None)  # type: ignore[arg-type]  # it is not reached
    assert str(checkpoint / file) in str(refused.value)
    assert reason.replace("bytes were written", "") in str(refused.value)
    assert saved.steps() == [3]  # nothing was moved
