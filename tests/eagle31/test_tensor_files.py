import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from eagle31.errors import UserError
from eagle31.tensor_files import load_pickled, load_tensors, open_tensors, read_header

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 4976698672\n"
TENSORS = {"a": torch.arange(6, dtype=torch.float32).reshape(2, 3), "b": torch.ones(0, 4, dtype=torch.int32)}


def test_tensors_read_back(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file(TENSORS, path, metadata={"format": "pt"})
    found = load_tensors(path)
    assert found.keys() == TENSORS.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in TENSORS.items())
    with path.open("rb") as file:
        entries = read_header(file, path)
    assert {name: (one.dtype, one.shape) for name, one in entries.items()} == {
        "a": ("F32", (2, 3)),
        "b": ("I32", (0, 4)),
    }


DAMAGES: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "empty": (lambda content: b"", "has 0 bytes: it is truncated"),
    "pointer": (lambda content: POINTER, "a Git LFS pointer.*git lfs pull"),
    "html": (lambda content: b"<!DOCTYPE html><html>Not found</html>", "truncated or no safetensors file"),
    "zip": (
        lambda content: b"PK\x03\x04\0\0\0\0" + bytes(100),
        "for the header alone: it is truncated or no",
    ),
    "huge header": (
        lambda content: (1 << 40).to_bytes(8, "little") + content,
        "1,099,511,627,776 for the header",
    ),
    "cut in the header": (lambda content: content[:40], "truncated"),
    "cut in the data": (lambda content: content[:-5], "bytes where its header says"),
    "header altered": (lambda content: content.replace(b"F32", b"F99"), "is damaged"),
    "header is no object": (lambda content: (2).to_bytes(8, "little") + b"[]", "is damaged"),
    "offsets": (lambda content: content.replace(b"[0,24]", b"[9,24]"), "is damaged"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_named(tmp_path: Path, damage: str) -> None:
    path, (alter, message) = tmp_path / "model-00001-of-00061.safetensors", DAMAGES[damage]
    save_file(TENSORS, path)
    path.write_bytes(alter(path.read_bytes()))
    with pytest.raises(UserError, match=re.escape(f"{path}: ") + f".*{message}"), open_tensors(path):
        pass


@pytest.mark.parametrize("content", [POINTER, b"", b"nonsense", None])
def test_a_damaged_file_of_torch_is_named(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "average.pt"
    torch.save(TENSORS, path)
    assert torch.equal(load_pickled(path)["a"], TENSORS["a"])
    path.write_bytes(path.read_bytes()[:-30] if content is None else content)
    with pytest.raises(UserError, match=re.escape(f"{path}: ")):
        load_pickled(path)
