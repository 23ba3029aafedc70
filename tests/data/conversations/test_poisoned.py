"""Files in the directory of a saved data set that would run code if anything unpickled or imported them."""

import json
import os
import pickle
from pathlib import Path

import pyarrow as pa
import pytest
from datasets import Dataset

from data.conversations.reading import Source
from data.conversations.saved import load_saved
from eagle31.errors import UserError


class Poison:
    """Makes a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.mark),)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    directory = tmp_path / "data-0" / "train"
    Dataset.from_dict({"input_ids": [1, 2, 3]}).save_to_disk(str(directory))
    return directory


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    return tmp_path / "mark"


def test_a_column_with_a_pickled_type_is_not_unpickled(saved: Path, mark: Path) -> None:
    """Older releases of pyarrow unpickled the Python class of a column's type from the file."""
    poison = {"ARROW:extension:name": "arrow.py_extension_type", "ARROW:extension:metadata": b""}
    poison["ARROW:extension:metadata"] = pickle.dumps(Poison(mark))
    schema = pa.schema([pa.field("input_ids", pa.int64(), metadata=poison)])
    [path] = saved.glob("data-*.arrow")
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, schema) as stream:
        stream.write_table(pa.table({"input_ids": [7, 8]}, schema=schema))
    with pytest.raises(UserError, match="It is damaged"):
        load_saved(saved)
    assert not mark.exists()


def test_pickles_and_scripts_next_to_a_data_set_are_not_read(saved: Path, mark: Path) -> None:
    poison = pickle.dumps(Poison(mark))
    for name in ("cache-0.arrow", "data.pkl", "dataset.pickle", "state.pkl"):
        (saved / name).write_bytes(poison)
    for name in ("train.py", "data-0.py", "dataset.py", "__init__.py"):
        (saved / name).write_text(f"import os\nos.mkdir({str(mark)!r})\n")
    assert len(load_saved(saved)) == 3
    for name in ("state.json", "dataset_info.json"):
        (saved / name).unlink()
    with pytest.raises(UserError, match="cannot load it"):
        Source(str(saved)).fingerprint()
    assert not mark.exists()


@pytest.mark.parametrize("kind", ["os.system", "Path"])
def test_a_feature_has_only_a_type_of_datasets(saved: Path, kind: str) -> None:
    path = saved / "dataset_info.json"
    content = json.loads(path.read_text())
    content["features"] = {"input_ids": {"_type": kind, "dtype": "int64"}}
    path.write_text(json.dumps(content))
    with pytest.raises(UserError, match="It is damaged"):
        load_saved(saved)
