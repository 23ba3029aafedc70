"""Where the target answers a conversation, and what it is asked."""

import pytest

from data.conversations.prompts import prompt_messages, unprompted_header, with_missing_answers
from data.conversations.schemas import Conversation
from tests.data.conversations.chat_templates import CHATML, byte_level_tokenizer

ROLES = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}


def conversation(roles: str) -> Conversation:
    """Return a conversation of messages with these initials."""
    messages = ({"role": ROLES[initial], "content": f"{initial}{i}"} for i, initial in enumerate(roles))
    return Conversation("c", tuple(messages))


@pytest.mark.parametrize(
    ("roles", "answered", "prompt"),
    [
        ("u", "u+", "u"),
        ("su", "su+", "su"),
        ("uuu", "u+u+u+", "u"),
        ("uau", "uau+", "uau"),
        ("uauu", "uau+u+", "uau"),
        ("uua", "u+ua", "u"),
        ("usu", "u+su+", "u"),
        ("uaua", "uaua", "uau"),
        ("uaa", "uaa", "u"),
        # The results of tools are answered where the data has an answer.
        ("uat", "uat", "uat"),
        ("uata", "uata", "uat"),
        ("uatu", "uatu+", "uatu"),
    ],
)
def test_each_message_of_the_user_gets_an_answer(roles: str, answered: str, prompt: str) -> None:
    found = with_missing_answers(conversation(roles).messages)
    assert "".join(message["content"][:1] or "+" for message in found) == answered
    assert all(message["role"] == "assistant" for message in found if not message["content"])
    assert [one["content"] for one in prompt_messages(conversation(roles))] == [
        f"{initial}{i}" for i, initial in enumerate(prompt)
    ]


@pytest.mark.parametrize("roles", ["u", "uu", "uaua"])
def test_a_template_without_a_generation_prompt_is_found_with_and_without_answers(roles: str) -> None:
    unprompted = byte_level_tokenizer(CHATML.split("{%- if add_generation_prompt %}")[0])
    assert unprompted_header(unprompted, conversation(roles), {}) == "<|im_start|>assistant\n"
    assert unprompted_header(byte_level_tokenizer(CHATML), conversation(roles), {}) is None
