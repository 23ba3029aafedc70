"""No file from outside runs code, and no name in one leads out of its directory. See also ruff's S rules."""

import re
from pathlib import Path

import pytest
import torch

from eagle31.errors import UserError
from eagle31.json_files import file_within
from eagle31.tensor_files import load_pickled

ROOT = Path(__file__).resolve().parent.parent


def test_torch_loads_weights_only_and_no_code_is_trusted_by_default() -> None:
    files = [path for name in ("eagle31", "data", "train", "scripts") for path in (ROOT / name).rglob("*")]
    texts = {path: path.read_text(errors="replace") for path in files if path.is_file()}
    loads = [call for text in texts.values() for call in re.findall(r"torch\.load\([^)]*\)", text)]
    assert loads
    assert all("weights_only=True" in call for call in loads)
    trusted = re.compile(r"trust_remote_code(: bool)?\s*=\s*True")
    assert not [path for path, text in texts.items() if trusted.search(text)]
    recipes = {path: path.read_text() for path in (ROOT / "recipes").rglob("*.yaml")}
    trusting = {path.stem for path, text in recipes.items() if "trust_remote_code: true" in text}
    assert trusting <= {"kimi_k2_6"}


class Poison:
    """Creates a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return Path.touch, (self.mark,)  # type: ignore[return-value]


def test_a_poisoned_file_runs_nothing(tmp_path: Path) -> None:
    mark, path = tmp_path / "code-has-run", tmp_path / "weights.bin"
    torch.save({"fc.weight": torch.ones(2), "poison": Poison(mark)}, path)
    with pytest.raises(UserError, match="file="):
        load_pickled(path)
    assert not mark.exists()
    torch.load(path, weights_only=False)
    assert mark.exists(), "the file does run code where it is let"


@pytest.mark.parametrize("name", ["../a", "/etc/passwd", "a/../../b", "", ".", "..", "a\0b", None, 3])
def test_a_name_that_leaves_its_directory_is_refused(tmp_path: Path, name: object) -> None:
    with pytest.raises(UserError, match="which is no file inside"):
        file_within(tmp_path, name, tmp_path / "names.json")
