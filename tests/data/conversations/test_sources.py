import json

import datasets
import pytest

from data.conversations.reading import read_conversations, source_fingerprint
from eagle31.errors import UserError
from tests.data.conversations.jsonl_files import CALL, pair, write_jsonl


def test_too_many_malformed_rows_are_a_user_error_with_the_first_five(tmp_path):
    source = write_jsonl(tmp_path / "a.jsonl", [pair()] * 100 + ["{"] * 7)
    with pytest.raises(UserError, match="7 of 107 rows") as caught:
        read_conversations(source, max_malformed_fraction=0.05, field="data.eval")
    assert caught.value.field == "data.eval"
    assert "a.jsonl:105: " in str(caught.value)
    assert "a.jsonl:106: " not in str(caught.value)
    assert read_conversations(source, max_malformed_fraction=0.07).num_malformed == 7


def test_a_source_without_any_conversation_is_a_user_error_whatever_the_limit(tmp_path):
    source = write_jsonl(tmp_path / "a.jsonl", ["{"] * 7)
    with pytest.raises(
        UserError, match=r"All 7 rows are malformed.*\n.*a\.jsonl:1: the line is not JSON"
    ) as caught:
        read_conversations(source, max_malformed_fraction=1.0)
    assert "max_malformed_fraction" not in str(caught.value)
    with pytest.raises(UserError, match="The only row is malformed"):
        read_conversations(write_jsonl(tmp_path / "b.jsonl", [{"messages": "q"}]))


def test_a_line_of_invalid_utf8_is_malformed(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(json.dumps(pair()).encode() + b'\n{"question": "\xff"}\n')
    result = read_conversations(str(path), max_malformed_fraction=0.5)
    assert [where.rpartition(":")[2] for where, _ in result.malformed] == ["2"]


def test_a_json_array_parquet_and_a_saved_dataset_are_read_alike(tmp_path):
    rows = [
        {"messages": [{"role": "user", "content": f"q{i}"}, {"role": "assistant", "content": "a"}]}
        for i in (1, 2)
    ]
    # Arrow gives this key to every message.
    rows[0]["messages"][1]["tool_calls"] = [CALL]
    dataset = datasets.Dataset.from_list(rows)
    dataset.to_parquet(str(tmp_path / "a.parquet"))
    dataset.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict(train=dataset).save_to_disk(str(tmp_path / "splits"))
    (tmp_path / "a.json").write_text(json.dumps(rows, indent=1))
    expected = read_conversations(str(tmp_path / "a.json")).conversations
    assert "tool_calls" not in expected[1].messages[1]
    for name in ("a.parquet", "one", "splits"):
        assert read_conversations(str(tmp_path / name)).conversations == expected
    with pytest.raises(UserError, match="splits train, not test"):
        read_conversations(str(tmp_path / "splits"), split="test")


@pytest.mark.parametrize("source", ["missing.jsonl", "folder/missing.jsonl", "./a/b/c", "missing"])
def test_a_missing_source_is_a_user_error(source, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="no such file") as caught:
        read_conversations(source)
    assert caught.value.value == source


def test_other_files_and_directories_are_user_errors(tmp_path):
    (tmp_path / "a.txt").write_text("a,b\n")
    with pytest.raises(UserError, match=r"Only \.jsonl"):
        read_conversations(str(tmp_path / "a.txt"))
    with pytest.raises(UserError, match="cannot load it"):
        read_conversations(str(tmp_path))
    (tmp_path / "a.parquet").write_text("not Parquet")
    with pytest.raises(UserError, match="not a readable Parquet file"):
        read_conversations(str(tmp_path / "a.parquet"))
    (tmp_path / "a.json").write_text('[{"messages": ')
    with pytest.raises(UserError, match="starts like a JSON array but is not valid"):
        read_conversations(str(tmp_path / "a.json"))
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(UserError, match="no rows"):
        read_conversations(str(tmp_path / "empty.jsonl"))


def test_the_fingerprint_covers_the_content(tmp_path):
    first = write_jsonl(tmp_path / "a.jsonl", [pair("a")])
    same = write_jsonl(tmp_path / "b.jsonl", [pair("a")])
    other = write_jsonl(tmp_path / "c.jsonl", [pair("b")])
    assert source_fingerprint(first) == source_fingerprint(same) != source_fingerprint(other)
    datasets.Dataset.from_list([pair("zebra")]).save_to_disk(str(tmp_path / "saved"))
    saved = source_fingerprint(str(tmp_path / "saved"))
    assert saved == source_fingerprint(str(tmp_path / "saved"))
    [arrow] = (tmp_path / "saved").glob("*.arrow")
    before = arrow.read_bytes()
    assert b"zebra" in before
    arrow.write_bytes(before.replace(b"zebra", b"cobra"))
    assert source_fingerprint(str(tmp_path / "saved")) != saved
