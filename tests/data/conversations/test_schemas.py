import json
from collections.abc import Iterable
from typing import Any

import pytest

from data.conversations.reading import Source
from data.conversations.schemas import Conversation
from eagle31.errors import UserError
from tests.data.conversations.jsonl_files import CALL, pair, write_jsonl

TOOL = {"type": "function", "function": {"name": "add", "parameters": {}}}
TOOL_MESSAGES = [
    {"role": "system", "content": "Count."},
    {"role": "user", "content": [{"type": "text", "text": "two"}, {"type": "text", "text": "and two"}]},
    {"role": "assistant", "content": None, "reasoning_content": "I add.", "tool_calls": [CALL]},
    {"role": "tool", "content": "", "tool_call_id": "1"},
    {"role": "assistant", "content": "four", "tool_calls": []},
]


def roles_and_contents(conversations: Iterable[Conversation]) -> list[list[tuple[str, str]]]:
    return [[(m["role"], m["content"]) for m in c.messages] for c in conversations]


def test_openai_messages_keep_the_keys_of_templates(tmp_path):
    source = write_jsonl(tmp_path / "a.jsonl", [{"id": 7, "messages": TOOL_MESSAGES, "tools": [TOOL]}])
    (conversation,) = Source(source).reader()
    assert conversation.id == "7"
    assert conversation.tools == (TOOL,)
    system, user, call, tool, answer = conversation.messages
    assert system["content"] == "Count."
    assert user["content"] == "two\nand two"
    assert call["content"] == ""
    assert call["reasoning_content"] == "I add."
    assert call["tool_calls"][0]["function"]["arguments"] == {"a": 2}
    assert tool == {"role": "tool", "content": "", "tool_call_id": "1"}
    assert answer == {"role": "assistant", "content": "four"}


ROLES = [("system", "s"), ("human", "h"), ("gpt", "g"), ("observation", "o"), ("gpt", "a"), ("user", "u")]
MESSAGES = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
SYSTEM = {"role": "system", "content": "s"}
ASKED = {"prompt_column": "ask", "response_column": "reply"}


@pytest.mark.parametrize(
    ("row", "settings", "expected"),
    [
        # docs/data.md has others.
        ({"conversations": MESSAGES}, {}, "user q assistant a"),
        (
            {"conversations": [{"from": role, "value": value} for role, value in ROLES]},
            {},
            "system s user h assistant g tool o assistant a user u",
        ),
        ({"instruction": "q", "output": "a"}, {}, "user q assistant a"),
        ({"question": "q", "answer": "a"}, {}, "user q assistant a"),
        (
            {"prompt": "n", "response": "n", "ask": "q", "reply": "a"},
            ASKED,
            "user q assistant a",
        ),
        ({"system": None, "messages": MESSAGES}, {}, "user q assistant a"),
        ({"system": "s", "messages": [SYSTEM, *MESSAGES]}, {}, "system s user q assistant a"),
        (
            {"history": MESSAGES, "ask": "q", "reply": "a"},
            ASKED,
            "user q assistant a user q assistant a",
        ),
        ({"instruction": "q", "context": "c", "response": "a"}, {}, "user q\n\nc assistant a"),
        ({"messages": MESSAGES[:1], "answer": "a"}, {}, "user q assistant a"),
        ({"messages": MESSAGES, "answer": "n"}, {}, "user q assistant a"),
        ({"history": MESSAGES}, {"prompt_column": "history"}, "user q assistant a"),
        ({"dialog": json.dumps(MESSAGES), "context": "c"}, {}, "user q assistant a"),
        ({"ask": json.dumps(MESSAGES)}, {"prompt_column": "ask"}, "user q assistant a"),
        ({"prompt": MESSAGES[:1], "context": "c", "answer": "a"}, {}, "user q assistant a"),
        ({"chosen": MESSAGES, "rejected": MESSAGES}, {"prompt_column": "chosen"}, "user q assistant a"),
        (MESSAGES, {}, "user q assistant a"),
        (
            {"conversations": [{"from": "gpt", "value": "g"}, SYSTEM, *MESSAGES]},
            {},
            "system s user q assistant a",
        ),
        ({"messages": [*MESSAGES, {"role": "human", "content": ""}]}, {}, "user q assistant a"),
        ({"messages": None, "prompt": "q", "input": None, "response": "a"}, {}, "user q assistant a"),
        ({"prompt": "q", "question": None, "system": None, "response": "a"}, {}, "user q assistant a"),
        ({"instruction": "", "input": "q", "output": ["a"]}, {}, "user q assistant a"),
        ({"dialog": json.dumps(MESSAGES).replace("[{", "[ {")}, {}, "user q assistant a"),
        *(
            (row, {"require_answer": False, **columns}, expected)
            for row, columns, expected in [
                ({"messages": [{"role": "User", "text": "h"}]}, {}, "user h"),
                ({"messages": [{"role": "user", "value": "h"}]}, {}, "user h"),
                ({"system_message": "s", "prompt": "p"}, {}, "system s user p"),
                ({"prompt": ["first", "second"]}, {}, "user first user second"),
                ({"prompt": MESSAGES}, {}, "user q assistant a"),
                ({"prompt": json.dumps(MESSAGES)}, {}, "user q assistant a"),
                ({"prompt": '[{"a": 1}] is what?'}, {}, 'user [{"a": 1}] is what?'),
                ({"prompt": [{"type": "text", "text": "p"}]}, {}, "user p"),
                ({"question": "p", "canonical_solution": "s"}, {}, "user p"),
                ({"instruction": "p", "output": ""}, {}, "user p"),
                ({"question": "q", "answer": None}, {}, "user q"),
                ({"question": "q", "answer": "a"}, {"prompt_column": "question"}, "user q"),
                ({"question": "q", "answer": ["a", "b"]}, {}, "user q"),
                ({"ask": "q", "reply": ["a", "b"]}, ASKED, "user q"),
                ({"messages": MESSAGES[:1]}, {}, "user q"),
                ({"conversations": [{"from": "human", "value": "h"}]}, {}, "user h"),
            ]
        ),
    ],
)
def test_known_schemas_and_named_columns_are_read(tmp_path, row, settings, expected):
    source = write_jsonl(tmp_path / "a.jsonl", [row])
    [found] = roles_and_contents(Source(source, **settings).reader())
    assert " ".join(f"{role} {content}" for role, content in found) == expected


@pytest.mark.parametrize(
    ("row", "columns", "excerpt"),
    [
        ({"sentence": "x", "label": 1}, {}, "sentence, label"),
        ({"prompt": "a", "response": "b", "question": "c", "answer": "d"}, {}, "Several schemas fit"),
        ({"prompt": "a", "response": "b"}, {"response_column": "response"}, "Name both"),
        ({"prompt": "a", "turns": ["b"]}, {"require_answer": False}, "Several schemas fit"),
        ({"chosen": MESSAGES, "rejected": MESSAGES}, {}, "Several schemas fit.*name data.prompt_column"),
        ({"prompt": "q", "response": ["a", "b"]}, {}, "it has 2 answers"),
        ({"prompt": str(MESSAGES), "response": "a"}, {}, "messages are not JSON"),
        ({"messages": None, "prompt": None, "response": None}, {}, "messages is missing"),
        ({"text": "<|im_start|>user"}, {}, "template's markers.*or name text as the prompt column"),
        (
            {"prompt": "a", "response": "b"},
            {"prompt_column": "prompt", "response_column": "reply"},
            "no column reply",
        ),
    ],
)
def test_unknown_and_ambiguous_columns_are_user_errors(tmp_path, row, columns, excerpt):
    source = write_jsonl(tmp_path / "a.jsonl", [row])
    with pytest.raises(UserError, match=excerpt):
        list(Source(source, **columns).reader())


def test_a_conversation_ends_before_its_first_image_and_is_no_malformed_row(tmp_path):
    text, image = {"type": "text", "text": "what is"}, {"type": "image_url", "image_url": {"url": "a.png"}}
    first = [{"role": "user", "content": [text, text]}, {"role": "assistant", "content": "a"}]
    with_image = {"role": "user", "content": [text, image]}
    answer = {"role": "assistant", "content": [{"type": "output_text", "text": "b"}]}
    rows = [
        [with_image, answer],
        [*first, with_image, answer],
        [*first, answer],
        [first[0], with_image, answer],
    ]
    source = Source(str(write_jsonl(tmp_path / "a.jsonl", [{"messages": row} for row in rows])))
    reader = source.reader()
    assert [len(one.messages) for one in reader] == [2, 3]
    assert (reader.num_rows, reader.cut.total(), reader.malformed) == (4, 1, [])
    assert [where.rpartition(":")[2] for where, _ in reader.left_out] == ["1", "4"]
    write_jsonl(tmp_path / "a.jsonl", [{"messages": rows[0]}])
    with pytest.raises(UserError, match=r"of 1 nothing can be used.*\n.*images"):
        list(reader)
    # As LLaVA's: the text says where the image of the row is.
    marked = [MESSAGES[0] | {"content": "<image>\nq"}, MESSAGES[1]]
    rows = [{"images": images, "messages": [*MESSAGES, *marked]} for images in (["a.png"], [])]
    write_jsonl(tmp_path / "a.jsonl", rows)
    assert [len(one.messages) for one in reader] == [2, 4]


def test_malformed_rows_are_left_out_and_named(tmp_path):
    def messages(*items: tuple[Any, Any]) -> dict[str, Any]:
        return {"messages": [{"role": role, "content": content} for role, content in items]}

    good = messages(("user", "q"), ("user", "and"), ("assistant", "a"))
    rows = [
        good,
        '{"messages": ',
        "",
        messages(("user", "q")),
        messages(("user", "q"), ("narrator", "n"), ("assistant", "a")),
        messages(("user", "q"), ("assistant", "  ")),
        messages(("user", 3), ("assistant", "a")),
        messages(("assistant", "a"), ("user", "q"), ("assistant", "a")),
        {"messages": "q"},
        [1, 2],
        {"message": []},
        messages(("user", [{"type": "citation"}]), ("assistant", "a")),
        good,
    ]
    source = write_jsonl(tmp_path / "a.jsonl", rows)
    reader = Source(source, max_malformed_fraction=0.9).reader()
    assert len(list(reader)) == 3
    assert [int(where.rpartition(":")[2]) for where, _ in reader.malformed] == [2, 4, 5, 7, 9, 10, 11, 12]
    assert [int(where.rpartition(":")[2]) for where, _ in reader.left_out] == [6]
    assert "unknown role 'narrator'" in reader.malformed[2][1]


def test_ids_come_from_the_row_or_its_content(tmp_path):
    rows = [pair("a") | {"id": "mine"}, pair("b"), pair("c"), pair("b")]
    first, second, third, fourth = Source(write_jsonl(tmp_path / "a.jsonl", rows)).reader()
    assert first.id == "mine"
    assert second.id == fourth.id
    assert second.id != third.id


def test_calls_and_results_of_older_formats_become_those_of_templates(tmp_path):
    call, result = {"name": "add", "arguments": '{"a": 2}'}, {"role": "tool", "content": "2"}
    sharegpt = [
        {"from": "human", "value": "q"},
        {"from": "function_call", "value": json.dumps(call)},
        {"from": "observation", "value": "2"},
        {"from": "gpt", "value": "a"},
    ]
    openai = [
        MESSAGES[0],
        {"role": "assistant", "content": None, "function_call": call},
        result | {"role": "function"},
        MESSAGES[1],
    ]
    called = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    written = [MESSAGES[0], called, result, MESSAGES[1]]
    rows = [
        {"conversations": sharegpt, "tools": json.dumps([TOOL["function"]])},
        {"messages": openai, "functions": [TOOL["function"]]},
        {"messages": written, "tools": [TOOL]},
    ]
    found = list(Source(write_jsonl(tmp_path / "a.jsonl", rows)).reader())
    assert found[0].messages[1]["tool_calls"][0]["function"]["arguments"] == {"a": 2}
    assert found[0] == found[1] == found[2]
    assert found[0].tools == (TOOL,)


def test_a_turn_of_weight_zero_is_context_only(tmp_path):
    weights = {"weight": 0.0, "loss": False, "train": "False", "training": "0", "loss_weight": 0}
    for key, value in weights.items():
        messages = [*MESSAGES, MESSAGES[0] | {key: value}, MESSAGES[1] | {key: value}]
        [one] = Source(write_jsonl(tmp_path / "a.jsonl", [{"messages": messages}])).reader()
        assert list(one.messages) == [*MESSAGES, MESSAGES[0], MESSAGES[1] | {"weight": 0}]
        write_jsonl(tmp_path / "a.jsonl", [{"messages": messages[2:]}])
        with pytest.raises(UserError, match="all assistant turns are context only"):
            list(Source(str(tmp_path / "a.jsonl")).reader())
    [one] = Source(
        write_jsonl(
            tmp_path / "a.jsonl",
            [{"conversations": [MESSAGES[0], {"from": "gpt", "value": "a", "weight": 1}]}],
        )
    ).reader()
    assert list(one.messages) == MESSAGES


def test_rows_without_a_usable_turn_are_no_malformed_ones(tmp_path):
    answer, image = MESSAGES[1], {"role": "user", "content": [{"type": "image"}]}
    rows = [[], [answer], [SYSTEM], [MESSAGES[0], answer | {"content": " "}], [image, answer], MESSAGES]
    reader = Source(write_jsonl(tmp_path / "a.jsonl", [{"conversations": row} for row in rows])).reader()
    assert len(list(reader)) == 1
    assert [where.rpartition(":")[2] for where, _ in reader.left_out] == ["1", "2", "3", "4", "5"]
    assert reader.malformed == []


def test_two_different_system_prompts_make_a_row_malformed(tmp_path):
    rows = [{"system": "other", "messages": [SYSTEM, *MESSAGES]}]
    with pytest.raises(UserError, match="different system prompts"):
        list(Source(write_jsonl(tmp_path / "a.jsonl", rows)).reader())


def test_rows_before_the_first_conversation_do_not_decide_how_the_others_are_read(tmp_path):
    rows = [{"error": "timeout"}] * 3 + [{"prompt": "q", "response": "a", "note": 1}] * 397
    rows[200] = {"system": "s", "query": "q", "answer": "a"}
    source = write_jsonl(tmp_path / "a.jsonl", rows)
    reader = Source(source).reader()
    assert len(list(reader)) == 397
    assert reader.used == ["prompt", "response", "system", "query", "answer"]
    assert (reader.unused, len(reader.malformed)) == (["note"], 3)
    write_jsonl(tmp_path / "a.jsonl", [{"error": "timeout"}] * 1000 + ["{"] * 1000)
    with pytest.raises(UserError, match=r"No known schema fits\. The columns are error"):
        list(reader)
    assert reader.num_rows == 1000
