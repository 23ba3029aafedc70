import errno
import json
import os
from pathlib import Path

import pytest

from eagle31.errors import UserError
from eagle31.json_files import append_jsonl, read_json, read_jsonl, write_json, write_jsonl


def test_write_json_reads_back_with_paths_as_strings(tmp_path: Path) -> None:
    path = tmp_path / "new" / "value.json"
    write_json(path, {"export": tmp_path, "text": "größer", "lengths": (1, 2.5)})
    assert read_json(path) == {"export": str(tmp_path), "text": "größer", "lengths": [1, 2.5]}
    assert os.listdir(path.parent) == ["value.json"]


def test_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "value.json"
    write_json(path, 1)
    with pytest.raises(TypeError, match="object"):
        write_json(path, object())

    def full_disk(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError, match=r"space.*value\.json"):
        write_json(path, 2)
    assert read_json(path) == 1
    assert os.listdir(tmp_path) == ["value.json"]


def test_broken_json_names_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "value.json"
    path.write_text('{\n"a": 1,\n}')
    with pytest.raises(UserError, match=r"value\.json:3"):
        read_json(path)
    path.write_text('{"a": 1}\nnot\n{"a": 2}\n')
    with pytest.raises(UserError, match=r"value\.json:2"):
        read_jsonl(path)


def test_jsonl_appends_and_ignores_an_incomplete_last_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write_jsonl(path, [{"step": 1}, {"step": 2}])
    append_jsonl(path, {"step": 3, "loss": float("nan")})
    assert [record["step"] for record in read_jsonl(path)] == [1, 2, 3]
    with open(path, "a") as file:
        file.write(json.dumps({"step": 4})[:-3])
    assert [record["step"] for record in read_jsonl(path)] == [1, 2, 3]
