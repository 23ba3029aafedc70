import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from eagle31.errors import UserError
from eagle31.tensor_files import load_pickled, load_tensors, read_header

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 4976698672\n"
TENSORS = {"a": torch.arange(6, dtype=torch.float32).reshape(2, 3), "b": torch.ones(0, 4, dtype=torch.int32)}


def test_mapped_tensors_are_those_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    tensors = TENSORS | {
        "bf16": torch.randn(3, 4).bfloat16(),
        "complex": torch.randn(2, dtype=torch.complex64),
        "fp8": torch.randn(4).to(torch.float8_e4m3fn),
        "mask": torch.tensor([True, False, True]),
        "scalar": torch.tensor(7),
    }
    save_file(tensors, path, metadata={"made": "by hand"})
    with path.open("rb") as file:
        entries = read_header(file, path)
    assert [(entries[name].dtype, entries[name].shape) for name in "ab"] == [("F32", (2, 3)), ("I32", (0, 4))]
    found = load_tensors(path)
    written = path.read_bytes()
    path.unlink()
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        if name != "complex":
            assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(found[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))
    path.write_bytes(written)
    load_tensors(path)["a"].zero_()
    assert path.read_bytes() == written


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "pointer": lambda content: POINTER,
    "huge header": lambda content: (1 << 40).to_bytes(8, "little") + content,
    "cut in the data": lambda content: content[:-5],
    "more than its header says": lambda content: content + b"0",
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_named(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "model-00001-of-00061.safetensors"
    save_file(TENSORS, path)
    path.write_bytes(DAMAGES[damage](path.read_bytes()))
    with pytest.raises(UserError, match=re.escape(f"{path}: ")) as raised:
        load_tensors(path)
    assert ("git lfs pull" in raised.value.remedy) == (damage == "pointer")


@pytest.mark.parametrize("content", [POINTER, None])
def test_a_damaged_file_of_torch_is_named(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "average.pt"
    torch.save(TENSORS, path)
    assert torch.equal(load_pickled(path)["a"], TENSORS["a"])
    path.write_bytes(path.read_bytes()[:-30] if content is None else content)
    with pytest.raises(UserError, match=re.escape(f"{path}: ")):
        load_pickled(path)
