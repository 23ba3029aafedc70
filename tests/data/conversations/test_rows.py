import json

import pytest

from data.conversations import rows
from data.conversations.reading import read_conversations
from eagle31.errors import UserError


def prompts(path) -> list[str]:
    return [one.messages[0]["content"] for one in read_conversations(str(path)).conversations]


def test_csv_has_quoted_fields_lines_and_text_in_every_column(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text('\ufeffquestion,answer,tools\n"two\nlines, ""quoted""",4,\n17,yes,\n', encoding="utf-8")
    result = read_conversations(str(path))
    assert [tuple(m["content"] for m in one.messages) for one in result.conversations] == [
        ('two\nlines, "quoted"', "4"),
        ("17", "yes"),
    ]


def test_malformed_csv_rows_are_named_by_the_line_in_which_they_begin(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text('question,answer\n"a\nb",c\n\nd\ne,\nf,g\n')
    result = read_conversations(str(path), max_malformed_fraction=0.5)
    assert [where.rpartition(":")[2] for where, _ in result.malformed] == ["5", "6"]
    assert "1 fields, and the first line has 2" in result.malformed[0][1]
    assert "no assistant turn" in result.malformed[1][1]
    assert result.num_rows == 4


def test_csv_has_messages_as_json_and_tsv_has_tabs(tmp_path):
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "x" * 200_000}]
    text = json.dumps(messages).replace('"', '""')
    (tmp_path / "a.tsv").write_text(f'messages\tid\n"{text}"\tone\n[{{\ttwo\n')
    result = read_conversations(str(tmp_path / "a.tsv"), max_malformed_fraction=0.5)
    assert [one.id for one in result.conversations] == ["one"]
    assert result.conversations[0].messages == tuple(messages)
    assert "messages are not JSON" in result.malformed[0][1]


@pytest.mark.parametrize(
    ("content", "excerpt"),
    [
        (b"question,question\na,b\n", "same name"),
        (b'question,answer\n"a,b\n', "not a readable file"),
        (b"question,answer\n\xff,b\n", "not a readable file"),
        (b"", "no rows"),
    ],
)
def test_unreadable_csv_is_a_user_error(tmp_path, content, excerpt):
    path = tmp_path / "a.csv"
    path.write_bytes(content)
    with pytest.raises(UserError, match=excerpt):
        read_conversations(str(path))


@pytest.mark.parametrize("characters", [1, 7, 1 << 20])
def test_a_json_array_is_read_in_parts(tmp_path, monkeypatch, characters):
    monkeypatch.setattr(rows, "_ARRAY_CHARACTERS", characters)
    path = tmp_path / "a.json"
    expected = [{"question": f'{i} ",]}}[' + "é" * i, "answer": "a"} for i in range(30)]
    path.write_text("\ufeff [ " + " , \n".join(map(json.dumps, expected)) + "\n] \n", encoding="utf-8")
    assert prompts(path) == [row["question"] for row in expected]
    path.write_text(json.dumps([*expected, 123, 45]))
    assert len(read_conversations(str(path), max_malformed_fraction=0.1).malformed) == 2
    for broken in ('[{"question": "q", "answer": "a"} {', "[1, 2", "[1, 2,]", "[1] x", "[,1]", '["a]'):
        path.write_text(broken)
        with pytest.raises(UserError, match="starts like a JSON array but is not valid"):
            read_conversations(str(path))
    path.write_text("[]")
    with pytest.raises(UserError, match="no rows"):
        read_conversations(str(path))
