from collections.abc import Iterable
from pathlib import Path

import pytest

from data.conversations.perturbation import UNCHANGED
from data.conversations.schemas import Conversation
from data.conversations.table import AugmentedConversations, ConversationTable


def write_table(conversations: Iterable[Conversation], path: Path) -> ConversationTable:
    """Write the conversations to a file, and open it."""
    table = ConversationTable(path)
    for conversation in conversations:
        table.add(conversation)
    table.flush()
    return table


def conversations(number: int) -> list[Conversation]:
    tools = ({"type": "function", "function": {"name": "add"}},)
    return [
        Conversation(
            f"id-{i}",
            (
                {"role": "user", "content": f"é\ud800 {i}"},
                {"role": "assistant", "content": "", "tool_calls": [{"name": "add", "arguments": {"a": i}}]},
            ),
            tools if i % 2 else None,
        )
        for i in range(number)
    ]


@pytest.mark.parametrize("number", [0, 5])
def test_conversations_come_back_in_any_order(tmp_path, number):
    expected = conversations(number)
    table = write_table(iter(expected), tmp_path / "a.arrow")
    assert len(table) == number
    assert list(table) == expected
    assert [table[i] for i in reversed(range(number))] == expected[::-1]
    with pytest.raises(IndexError):
        table[number]


def test_the_template_of_some_conversations_is_another_one_which_depends_on_id_and_seed():
    some = conversations(400)
    changed = list(AugmentedConversations(some, 0.3, ["plain", "chatml"], seed=0))
    names = [one.template for one in changed]
    assert 80 < 400 - names.count(UNCHANGED) < 160
    assert min(names.count("plain"), names.count("chatml")) > 30
    assert [(one.id, one.messages) for one in changed] == [(one.id, one.messages) for one in some]
    reversed_ = AugmentedConversations(some[::-1], 0.3, ["plain", "chatml"], seed=0)
    assert [one.template for one in reversed_][::-1] == names
    other = AugmentedConversations(some, 0.3, ["plain", "chatml"], seed=1)
    assert [one.template for one in other] != names
