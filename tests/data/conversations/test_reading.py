"""Files, saved data sets and damaged ones, and which of their rows are conversations."""

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO, cast

import datasets
import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.conversations.files import _json_rows, unread_files
from data.conversations.reading import ConversationReader, Source
from data.conversations.schemas import MAX_CHARACTERS
from eagle31.errors import UserError
from tests.data.conversations.jsonl_files import CALL, pair, write_jsonl
from tests.data.conversations.test_table import write_table

ASKED, ANSWER = {"role": "user", "content": "q0"}, {"role": "assistant", "content": "2"}


def contents(path: Path, **settings: Any) -> list[tuple[str, ...]]:
    found = Source(str(path), **settings).reader()
    return [tuple(message["content"] for message in one.messages) for one in found]


def left_out(reader: ConversationReader) -> list[int]:
    """Return the lines of the malformed rows."""
    return [int(where.rpartition(":")[2]) for where, _ in reader.malformed]


def test_csv_has_quoted_fields_lines_and_text_in_every_column(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text('\ufeffquestion,answer,tools\n"two\nlines, ""quoted""",4,\n17,yes,\n', encoding="utf-8")
    assert contents(path) == [('two\nlines, "quoted"', "4"), ("17", "yes")]


def test_csv_has_messages_as_json_and_tsv_has_tabs(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "x" * 200_000}]
    text = json.dumps(messages).replace('"', '""')
    (tmp_path / "a.tsv").write_text(f'messages\tid\n"{text}"\tone\n[{{\ttwo\nonly\n')
    reader = Source(str(tmp_path / "a.tsv"), max_malformed_fraction=0.7).reader()
    assert [(one.id, one.messages) for one in reader] == [("one", tuple(messages))]
    assert left_out(reader) == [3, 4]


def test_compressed_files_are_read(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(json.dumps(pair("q")).encode()))
    assert contents(path) == [("q", "2")]
    path.write_bytes(b"not compressed")
    with pytest.raises(UserError, match="It cannot be read"):
        contents(path)
    (tmp_path / "b.jsonl").write_text(json.dumps(pair("q")))
    with pytest.raises(UserError, match=r"=.*/\*: .*/a\.jsonl\.gz cannot be read"):
        contents(tmp_path / "*")


def compressed(codec: str, content: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, codec) as stream:
        stream.write(content)
    return sink.getvalue().to_pybytes()


def test_files_of_a_directory_a_pattern_and_object_storage_are_read_with_their_names(tmp_path: Path) -> None:
    data = tmp_path / "set" / "data"
    data.mkdir(parents=True)
    (tmp_path / "set" / "README.md").write_text("A dataset.")
    for i, name in enumerate(("train-00000-of-00003", "train-00001-of-00003", "test-00000-of-00001")):
        datasets.Dataset.from_list([pair(f"q{i}")]).to_parquet(str(data / f"{name}.parquet"))
    pq.write_table(pa.table({"question": [], "answer": []}), data / "train-00002-of-00003.parquet")
    for split, expected in {"train": [("q0", "2"), ("q1", "2")], "test": [("q2", "2")]}.items():
        assert contents(tmp_path / "set", split=split) == expected
    with pytest.raises(UserError, match="no split other, only train, test"):
        contents(tmp_path / "set", split="other")
    assert unread_files(str(tmp_path / "set"), "data.train", None) == []
    for name in ("more.parquet", "train.jsonl"):
        (tmp_path / "set" / name).touch()
    assert unread_files(str(tmp_path / "set"), "data.train", None) == ["more.parquet", "train.jsonl"]
    fingerprints = {Source(str(tmp_path / "set"), split=split).fingerprint() for split in ("train", "test")}
    assert len(fingerprints) == 2

    lines = [json.dumps(pair(f"q{i}")).encode() + b"\n" for i in range(3)]
    (tmp_path / "a0.jsonl").write_bytes(lines[0])
    (tmp_path / "a1.jsonl.zst").write_bytes(compressed("zstd", lines[1] + b"{\n"))
    (tmp_path / "a[2].JSONL").write_bytes(lines[2])
    (tmp_path / "a3.jsonl.lz4").write_bytes(lines[2])
    (tmp_path / "a4").mkdir()
    reader = Source(str(tmp_path / "a*"), max_malformed_fraction=0.3).reader()
    assert [one.messages[0]["content"] for one in reader] == ["q0", "q1", "q2"]
    assert [where for where, _ in reader.malformed] == [f"{tmp_path}/a1.jsonl.zst:2"]
    assert unread_files(str(tmp_path / "a*"), "data.train", None) == [f"{tmp_path}/a3.jsonl.lz4"]
    assert contents(tmp_path / "a[2].JSONL") == [("q2", "2")]
    with pytest.raises(UserError, match="no such file"):
        contents(tmp_path / "b*.jsonl")

    storage = fsspec.filesystem("memory")
    storage.pipe({f"/set/{i}.jsonl": line + b"[\n" for i, line in enumerate(lines)})
    reader = Source("memory://set/*.jsonl", max_malformed_fraction=0.5).reader()
    assert [one.messages[0]["content"] for one in reader] == ["q0", "q1", "q2"]
    assert [where for where, _ in reader.malformed] == [f"memory:///set/{i}.jsonl:2" for i in range(3)]
    before = Source("memory://set/*.jsonl").fingerprint()
    storage.pipe("/set/2.jsonl", lines[0] * 2)
    assert Source("memory://set/*.jsonl").fingerprint() != before
    with pytest.raises(UserError, match=r"memory://set/\*\.parquet"):
        list(Source("memory://set").reader())


@pytest.mark.parametrize(
    "text",
    [
        json.dumps({"version": 1, "data": [pair("q0"), pair("q1")]}, indent=2),
        json.dumps({"version": 1, "data": [pair("q0"), pair("q1")]}),
        '{"data": [\n' + json.dumps(pair("q0")) + ",\n" + json.dumps(pair("q1")) + "\n]}",
        json.dumps([pair("q0"), pair("q1")], indent=2),
        "\n".join(json.dumps(pair(text) | {"data": [{"a": 1}]}) for text in ("q0", "q1")),
        json.dumps([ASKED, ANSWER]) + "\n" + json.dumps([ASKED | {"content": "q1"}, ANSWER]),
        json.dumps([[ASKED, ANSWER], [ASKED | {"content": "q1"}, ANSWER]], indent=2),
        json.dumps({"messages": [ASKED, ANSWER, ASKED | {"content": "q1"}, ANSWER]}, indent=2),
    ],
    ids=range(8),
)
def test_json_lines_arrays_and_objects_with_rows_are_told_apart(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.json").write_text(text)
    found = contents(tmp_path / "a.json")
    assert [text for one in found for text in one] == ["q0", "2", "q1", "2"]


def test_lines_of_messages_are_read_one_by_one() -> None:
    lines = [json.dumps([ASKED, ANSWER])] * 2
    assert [row for _, row in _json_rows("a.jsonl", cast("TextIO", iter(lines)))] == [[ASKED, ANSWER]] * 2


def test_a_text_file_has_a_prompt_on_each_line(tmp_path: Path) -> None:
    path = tmp_path / "a.txt.gz"
    lines = "\ufefffirst\n\n  \r\n second one \r\n\u2028third\n".encode() + b"\xff\n"
    path.write_bytes(gzip.compress(lines))
    reader = Source(str(path), require_answer=False, max_malformed_fraction=0.3).reader()
    assert [one.messages for one in reader] == [
        ({"role": "user", "content": text},) for text in ("first", "second one", "third")
    ]
    assert left_out(reader) == [6]


def test_a_json_array_parquet_and_a_saved_dataset_are_read_alike(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
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
    expected = list(Source(str(tmp_path / "a.json")).reader())
    assert "tool_calls" not in expected[1].messages[1]
    for name in ("a.parquet", "one", "splits"):
        assert list(Source(str(tmp_path / name)).reader()) == expected
    with pytest.raises(UserError, match="no split test, only train"):
        Source(str(tmp_path / "splits"), split="test").fingerprint()


def test_formats_and_media_of_a_saved_dataset_do_not_matter(tmp_path: Path) -> None:
    media = {
        "image": datasets.Image(),
        "sounds": datasets.List(datasets.Audio()),
        "messages": datasets.Json(),
    }
    damaged = {"bytes": b"no image", "path": None}
    columns = {"image": [damaged], "sounds": [[damaged]], "messages": [json.dumps([ASKED, ANSWER])]}
    table = pa.table(columns, schema=datasets.Features(media).arrow_schema)
    datasets.Dataset(table).save_to_disk(str(tmp_path / "saved"))
    pq.write_table(table, tmp_path / "a[1].parquet")
    assert contents(tmp_path / "saved") == contents(tmp_path / "a[1].parquet") == [("q0", "2")]
    dataset = datasets.Dataset.from_dict({"input_ids": [[1, 2, 3]], "loss_mask": [[0, 1, 1]]})
    dataset.with_format("torch", columns=["input_ids"]).save_to_disk(str(tmp_path / "torch"))
    assert contents(tmp_path / "torch") == [("1", "2 3")]


def test_too_many_malformed_rows_are_a_user_error_with_the_first_five(tmp_path: Path) -> None:
    source = Source(write_jsonl(tmp_path / "a.jsonl", [pair()] * 100 + ["{"] * 7), field="data.eval")
    with pytest.raises(UserError, match="7 of 107 rows") as caught:
        list(replace(source, max_malformed_fraction=0.05).reader())
    assert caught.value.field == "data.eval"
    assert "a.jsonl:105: " in str(caught.value)
    assert "a.jsonl:106: " not in str(caught.value)
    assert len(list(replace(source, max_malformed_fraction=0.07).reader())) == 100


NESTED = "[" * 100_000 + "]" * 100_000


@pytest.mark.parametrize(
    "line",
    [
        '{"messages": ' + NESTED + "}",
        '{"messages": ' + "9" * 5000 + "}",
        json.dumps({"messages": [ASKED, ANSWER | {"content": "\ud800"}]}),
        json.dumps({"messages": [ASKED, ANSWER], "tools": [{"a": "\udfff"}]}),
        json.dumps({"messages": [ASKED, ANSWER | {"content": "é"}]}, ensure_ascii=False).encode("latin-1"),
        json.dumps({"messages": [ASKED, ANSWER | {"content": "x" * MAX_CHARACTERS}]}),
        '{"question": "q", "answer": "a", "answer": "b"}',
    ],
    ids=range(7),
)
def test_a_row_that_cannot_be_used_is_left_out_and_named(tmp_path: Path, line: str | bytes) -> None:
    path = tmp_path / "a.jsonl"
    bad = line if isinstance(line, bytes) else line.encode()
    path.write_bytes(json.dumps(pair()).encode() + b"\n" + bad + b"\n")
    reader = Source(str(path), max_malformed_fraction=0.5).reader()
    assert len(list(reader)) == 1
    assert left_out(reader) == [2]
    path.write_bytes(bad)
    with pytest.raises(UserError):
        list(Source(str(path), max_malformed_fraction=1.0).reader())


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.md", b"a,b\n"),
        ("a.parquet", b"not Parquet"),
        ("a.json", b'[{"messages": '),
        ("a.jsonl", b"\n"),
        ("a.jsonl", json.dumps(pair()).encode("utf-16")),
        ("a.csv", b'question,answer\n"a,b\n'),
        ("a.csv", b"question,answer,answer\na,b,c\n"),
        ("a.txt", "one\ntwo\nthree\n".encode("utf-16")),
        ("missing.jsonl", None),
        ("missing", None),
        (".", None),
    ],
)
def test_what_is_no_source_is_a_user_error_with_its_field(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, content: bytes | None
) -> None:
    monkeypatch.chdir(tmp_path)
    if content is not None:
        Path(name).write_bytes(content)
    with pytest.raises(UserError) as caught:
        list(Source(name, require_answer=False, max_malformed_fraction=1.0).reader())
    assert (caught.value.field, caught.value.value) == ("data.train", name)


def test_the_fingerprint_covers_the_content(tmp_path: Path) -> None:
    first, same, other = (
        Source(write_jsonl(tmp_path / f"{i}.jsonl", [pair(text)])).fingerprint()
        for i, text in enumerate("aab")
    )
    assert first == same != other
    datasets.Dataset.from_list([pair("zebra")]).save_to_disk(str(tmp_path / "saved"))
    source = Source(str(tmp_path / "saved"))
    saved = source.fingerprint()
    assert saved == source.fingerprint()
    [arrow] = (tmp_path / "saved").glob("*.arrow")
    arrow.write_bytes(arrow.read_bytes().replace(b"zebra", b"cobra"))
    assert source.fingerprint() != saved


texts = st.text(alphabet=st.characters(codec=None, exclude_categories=()), max_size=20)  # surrogates too
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)
roles = st.sampled_from(["system", "user", "assistant", "tool", "human", "gpt", "robot"])
turns = st.fixed_dictionaries(
    {}, optional={"role": roles, "from": roles, "content": values, "value": texts, "tool_calls": values}
)
rows = st.one_of(
    st.fixed_dictionaries(
        {"messages": st.lists(turns, max_size=4)}, optional={"id": values, "tools": values}
    ),
    st.fixed_dictionaries({"prompt": texts, "response": texts}),
)
json_files = st.lists(rows, max_size=4).map(lambda found: json.dumps(found).encode())


@settings(max_examples=25)
@given(content=st.binary(max_size=200) | json_files)
def test_whatever_a_file_has_is_read_and_can_be_stored_or_is_refused(
    content: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = tmp_path_factory.mktemp("any")
    for suffix in (".json", ".csv", ".parquet"):
        path = directory / f"a{suffix}"
        path.write_bytes(content)
        try:
            found = list(Source(str(path), max_malformed_fraction=1.0).reader())
        except UserError:
            continue
        table = write_table(found, directory / "table")
        assert [one.id for one in table] == [one.id for one in found]
