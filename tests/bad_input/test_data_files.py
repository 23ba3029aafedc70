"""Files of conversations that cannot be read, as scripts/inspect_data answers them."""

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from datasets import Dataset, DatasetDict

from data.conversations import rows as rows_module
from data.embedded.target import EmbeddedTarget
from tests.bad_input.commands import Case, CheckCase, each, link

INSPECT = "scripts/inspect_data"
USER, ANSWER = {"role": "user", "content": "what"}, {"role": "assistant", "content": "four"}
ROW = json.dumps({"messages": [USER, ANSWER]})
EMPTY = "The only row is malformed"


def file(
    name: str, content: str | bytes, *says: str, source: str = "a.jsonl", options: tuple[str, ...] = ()
) -> Case:
    """Return the case of a file with this content."""
    data = content.encode() if isinstance(content, str) else content
    return made(
        name, lambda directory: _written(directory / source, data), *says, source=source, options=options
    )


def _written(path: Path, data: bytes) -> None:
    path.write_bytes(data)


def made(
    name: str,
    prepare: Callable[[Path], None],
    *says: str,
    source: str = "a.jsonl",
    options: tuple[str, ...] = (),
) -> Case:
    return Case(
        name,
        (source, "--tokenizer", "target", *options),
        ("error: ", *says),
        prepare,
        INSPECT,
        absent=("data.m",),
    )


def messages(*found: Any, **further: Any) -> str:
    return json.dumps({"messages": list(found), **further})


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


def parquet(**columns: Any) -> bytes:
    sink = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table(columns), sink, compression="none")
    return sink.getvalue()


PARQUET = parquet(prompt=["what"] * 200, response=["four"] * 200)
JSONL = [
    file("empty", "", "data=a.jsonl: It has no rows"),
    file("blank_lines", "\n\n  \n", "data=a.jsonl: It has no rows"),
    file("zeros", b"\0" * 4096, EMPTY, "not JSON"),
    file("random_bytes", bytes(range(256)), "malformed", "0x80, which is not UTF-8"),
    file("half_a_line", ROW[:-9], EMPTY, "a.jsonl:1: the line is not JSON"),
    file("two_objects_in_a_line", ROW + ROW, EMPTY, "Extra data"),
    file("pretty_printed", json.dumps({"messages": [USER, ANSWER]}, indent=1), "rows are malformed"),
    file("deeply_nested", nested(100_000)[1:-1].join("[]"), "data=a.jsonl: It starts like a JSON array"),
    file("deep_in_a_row", f'{{"messages": {nested(100_000)}}}', EMPTY, "not JSON"),
    file("deep_in_a_message", messages(USER, {**ANSWER, "x": json.loads(nested(150))}), "more than 100 deep"),
    file("long_number", '{"messages": ' + "9" * 5000 + "}", EMPTY, "not JSON"),
    file("lone_surrogate", messages(USER, {**ANSWER, "content": "\ud800"}), r"has \ud800, half of a UTF-16"),
    file("surrogate_in_a_key", messages(USER, {**ANSWER, "\udfff": 1}), r"has \udfff, half of a UTF-16"),
    file("surrogate_in_a_tool", messages(USER, ANSWER, tools=[{"a": "\ud800"}]), r"has \ud800"),
    file("surrogate_as_id", messages(USER, ANSWER, id="\udc00"), r"has \udc00"),
    file("utf_16", ROW.encode("utf-16"), "It is UTF-16 or UTF-32; convert it to UTF-8"),
    file("utf_16_big_endian", b"\xfe\xff" + ROW.encode("utf-16-be"), "It is UTF-16; convert it"),
    file("utf_32", ROW.encode("utf-32"), "It is UTF-16 or UTF-32; convert it"),
    file(
        "latin_1", messages(USER, ANSWER).replace("four", "é").encode("latin-1"), "0xe9, which is not UTF-8"
    ),
    file("gzip", b"\x1f\x8b\x08\x00", "It is compressed with gzip; unpack it"),
    file("zstd", b"\x28\xb5\x2f\xfd\x00", "It is compressed with zstd; unpack it"),
    file("xz", b"\xfd7zXZ\x00", "It is compressed with xz; unpack it"),
    file("bzip2", b"BZh91AY", "It is compressed with bzip2; unpack it"),
    file("zip", b"PK\x03\x04", "It is a ZIP archive; unpack it"),
    file("parquet_as_jsonl", PARQUET, "It is a Parquet file; name it .parquet"),
    file(
        "lfs_pointer", "version https://git-lfs.github.com/spec/v1\n", "It is a Git LFS pointer; run `git lfs"
    ),
    file("a_number", "7", EMPTY, "the row is a int, not an object"),
    file("a_text", '"what"', EMPTY, "the row is a str, not an object"),
    file("null", "null", EMPTY, "the row is a NoneType, not an object"),
    file("empty_object", "{}", "No known schema fits. The first row has no columns"),
    file("other_columns", '{"text": "a"}', "The columns are text.", "--prompt-column"),
    file("many_columns", json.dumps({f"c{i}": 1 for i in range(5000)}), "c39, ...", "The known schemas"),
    file("two_schemas", '{"prompt":"a","response":"b","question":"c","answer":"d"}', "Several schemas fit"),
    file(
        "no_such_column",
        ROW,
        "There is no column a, q",
        options=("--prompt-column", "q", "--response-column", "a"),
    ),
    file("half_of_the_columns", ROW, "Name both --prompt-column", options=("--prompt-column", "messages")),
    file("only_an_input_column", ROW, "Name --prompt-column, which", options=("--input-column", "messages")),
    file("messages_is_text", '{"messages": "a"}', EMPTY, "messages is a str, not a list"),
    file("messages_is_null", '{"messages": null}', EMPTY, "messages is missing, not a list"),
    file("no_messages", messages(), EMPTY, "no assistant turn"),
    file("message_is_text", messages("a"), EMPTY, "a message is a str, not an object"),
    file("no_role", messages({"content": "a"}), EMPTY, "neither role nor from, only content"),
    file("unknown_role", messages(USER, {**ANSWER, "role": "robot"}), EMPTY, "unknown role 'robot'"),
    file("long_role", messages(USER, {**ANSWER, "role": "r" * 10_000}), EMPTY, "unknown role 'rrr", "..."),
    file(
        "role_is_a_list",
        messages(USER, {**ANSWER, "role": ["assistant"]}),
        EMPTY,
        "unknown role ['assistant']",
    ),
    file(
        "unknown_sharegpt_role", '{"conversations":[{"from":"it","value":"a"}]}', EMPTY, "unknown role 'it'"
    ),
    file(
        "sharegpt_without_value",
        '{"conversations":[{"from":"human"},{"from":"gpt"}]}',
        EMPTY,
        "empty content",
    ),
    file("no_answer", messages(USER), EMPTY, "there is no assistant turn"),
    file("answer_first", messages(ANSWER, USER), EMPTY, "no user message before the first assistant turn"),
    file(
        "empty_question", messages({**USER, "content": " "}, ANSWER), EMPTY, "a message of the user has empty"
    ),
    file(
        "empty_answer", messages(USER, {**ANSWER, "content": ""}), EMPTY, "of the assistant has empty content"
    ),
    file(
        "content_is_a_number", messages(USER, {**ANSWER, "content": 4}), EMPTY, "content is a int, not text"
    ),
    file(
        "content_part_is_an_image", messages({**USER, "content": [{"type": "image"}]}, ANSWER), "is not text"
    ),
    file("tool_calls_is_text", messages(USER, {**ANSWER, "tool_calls": "a"}), EMPTY, "not a list of objects"),
    file(
        "arguments_of_a_call",
        messages(USER, {**ANSWER, "tool_calls": [{"function": {"arguments": "{"}}]}),
        "tool call arguments are not JSON",
    ),
    file("tools_is_text", messages(USER, ANSWER, tools="{"), EMPTY, "tools are not JSON"),
    file("tools_of_numbers", messages(USER, ANSWER, tools=[1]), EMPTY, "tools is not a list of objects"),
    file("index_beyond_the_end", ROW, "--index=5: There are 1 conversations", options=("--index", "5")),
    file("negative_index", ROW, "--index=-1: There are 1 conversations", options=("--index", "-1")),
    file("split_of_a_file", ROW, "--split=test: It has no effect", "is a file", options=("--split", "test")),
    file("subset_of_a_file", ROW, "--subset=main: It has no effect", options=("--subset", "main")),
]
OTHERS = [
    file("array_ends_early", f"[{ROW}, ", "not valid after 1 rows", source="a.json"),
    file("array_without_commas", f"[{ROW} {ROW}]", "Expecting ',' delimiter", source="a.json"),
    file("array_and_more", f"[{ROW}] x", "there is more after its end", source="a.json"),
    file("array_of_latin_1", b'[{"a": "\xe9"}]', "0xe9, which is not UTF-8", source="a.json"),
    file("empty_array", "[]", "It has no rows", source="a.json"),
    file("array_of_numbers", "[1, 2]", "All 2 rows are malformed", source="a.json"),
    file("csv_without_rows", "prompt,response\n", "It has no rows", source="a.csv"),
    file("csv_of_one_column", "prompt\nwhat\n", "No known schema fits", source="a.csv"),
    file("csv_with_a_column_twice", "prompt,prompt\na,b\n", "Two columns have the same name", source="a.csv"),
    file("csv_with_an_open_quote", 'prompt,response\na,"b\n', "not a readable file", source="a.csv"),
    file("csv_of_latin_1", b"prompt,response\na,\xe9\n", "0xe9, which is not UTF-8", source="a.csv"),
    file("csv_of_utf_16", "prompt,response\n".encode("utf-16"), "It is UTF-16", source="a.csv"),
    file("csv_with_a_short_row", "prompt,response\na\n", EMPTY, "it has 1 fields", source="a.csv"),
    file("csv_with_a_broken_list", 'messages\n"[{"\n', EMPTY, "messages are not JSON", source="a.csv"),
    file("tsv_with_commas", "prompt,response\na,b\n", "The columns are prompt,response.", source="a.tsv"),
    file("parquet_of_nothing", b"", "not a readable Parquet file", source="a.parquet"),
    file("parquet_of_text", "what", "not a readable Parquet file", source="a.parquet"),
    file("parquet_cut_short", PARQUET[:-9], "not a readable Parquet file", source="a.parquet"),
    file("parquet_without_its_start", PARQUET[100:], "not a readable Parquet file", source="a.parquet"),
    file("parquet_without_rows", parquet(prompt=[], response=[]), "It has no rows", source="a.parquet"),
    file("parquet_of_numbers", parquet(prompt=[1], response=[2]), "not text", source="a.parquet"),
    file(
        "parquet_with_a_byte_of_no_character",
        parquet(prompt=["what"], response=["4four"]).replace(b"4four", b"\xfffour"),
        EMPTY,
        "0xff, which is not UTF-8",
        source="a.parquet",
    ),
    made("no_file", lambda _: None, "data=a.jsonl: There is no such file or directory"),
    made("no_suffix", lambda d: (d / "a").write_text(ROW), "Only .jsonl", source="a"),
    made("nobodys_home", lambda _: None, "It cannot be read", source="~nobody-of-that-name/a.jsonl"),
    made("long_name", lambda _: None, "It cannot be read: File name too long", source="a" * 300 + ".jsonl"),
    made("no_path_and_no_hub_id", lambda _: None, "There is no such file or directory", source="a/b/c"),
    made("empty_name", lambda _: None, "cannot load it", source=""),
    made("directory_of_nothing", lambda d: (d / "a").mkdir(), "`datasets` cannot load it", source="a"),
    made("directory_with_a_name_of_a_file", lambda d: (d / "a.jsonl").mkdir(), "`datasets` cannot load it"),
    made("pipe", lambda d: __import__("os").mkfifo(d / "a.jsonl"), "It is no regular file"),
    made("loop_of_links", lambda d: (d / "a.jsonl").symlink_to("a.jsonl"), "There is no such file"),
]


def saved(directory: Path, *, splits: bool) -> None:
    dataset = Dataset.from_dict({"prompt": ["what"], "response": ["four"]})
    (DatasetDict({"train": dataset}) if splits else dataset).save_to_disk(str(directory / "saved"))


def damage(directory: Path) -> None:
    saved(directory, splits=False)
    [path] = (directory / "saved").glob("*.arrow")
    path.write_bytes(path.read_bytes()[:40])


SAVED = [
    made(
        "no_such_split",
        lambda d: saved(d, splits=True),
        "splits train, not b",
        source="saved",
        options=("--split", "b"),
    ),
    made(
        "split_of_a_set_without_any",
        lambda d: saved(d, splits=False),
        "--split=b: It has no effect",
        "data set without any",
        source="saved",
        options=("--split", "b"),
    ),
    made("damaged_set", damage, "cannot load it", source="saved"),
    made(
        "set_without_its_schema",
        lambda d: (saved(d, splits=False), (d / "saved" / "dataset_info.json").unlink()),
        "cannot load it",
        source="saved",
    ),
]
OPTIONS = [
    file("no_key", ROW, "--template-kwargs=a: Write key=value", options=("--template-kwargs", "a")),
    file(
        "key_of_ours",
        ROW,
        "add_generation_prompt=True: It is set",
        options=("--template-kwargs", "add_generation_prompt=true"),
    ),
    file(
        "key_of_no_name", ROW, "--template-kwargs=a b=1: An argument", options=("--template-kwargs", "a b=1")
    ),
    file(
        "page_in_no_directory",
        ROW,
        "--html=no/page.html: It cannot be written",
        options=("--html", "no/page.html"),
    ),
    file("page_is_a_directory", ROW, "--html=.: It cannot be written", options=("--html", ".")),
    file(
        "no_template_file",
        ROW,
        "--chat-template=no: The file cannot be read",
        options=("--chat-template", "no"),
    ),
    file(
        "template_of_a_directory",
        ROW,
        "--chat-template=target: The file",
        options=("--chat-template", "target"),
    ),
    file("no_such_turns", ROW, "argument --turns: invalid choice: 'some'", options=("--turns", "some")),
    file("no_such_option", ROW, "unrecognized arguments: --banana", options=("--banana",)),
]


@each([*JSONL, *OTHERS, *SAVED, *OPTIONS])
def test_a_file_that_cannot_be_read_is_named(
    case: Case, check_case: CheckCase, small_target: EmbeddedTarget, tmp_path: Path
) -> None:
    link(tmp_path / "target", small_target.model)
    outcome = check_case(case)
    assert len(outcome.err) < 4000, "a message is short, whatever the file has"


def test_a_line_has_a_limit(
    check_case: CheckCase, small_target: EmbeddedTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link(tmp_path / "target", small_target.model)
    monkeypatch.setattr(rows_module, "_MAX_LINE_BYTES", 1 << 16)
    monkeypatch.setattr(rows_module, "_ARRAY_CHARACTERS", 1 << 12)
    long = messages(USER, {**ANSWER, "content": "four " * (1 << 15)})
    check_case(file("", f"{ROW}\n{long}", "data=a.jsonl:2: The line is longer than 65,536 bytes"))
    check_case(file("", f"[{ROW}, {long}]", "the next one is longer than 65,536", source="a.json"))
    check_case(file("", "prompt,response\na," + "b" * (1 << 17), "field limit", source="a.csv"))


def test_a_byte_order_mark_is_no_mistake(
    check_case: CheckCase, small_target: EmbeddedTarget, tmp_path: Path
) -> None:
    link(tmp_path / "target", small_target.model)
    for source, text in (("a.jsonl", ROW), ("a.json", f"[{ROW}]"), ("a.csv", "prompt,response\na,b")):
        (tmp_path / source).write_text(text, encoding="utf-8-sig")
        arguments = (source, "--tokenizer", "target")
        assert "conversations: 1," in check_case(Case("", arguments, (), script=INSPECT, status=0)).out
