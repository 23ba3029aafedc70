from data.conversations.overlap import EvaluationPrompts, normalized
from data.conversations.schemas import Conversation


def conversation(*contents: str) -> Conversation:
    roles = ("user", "assistant")
    return Conversation("x", tuple({"role": roles[i % 2], "content": c} for i, c in enumerate(contents)))


def test_white_space_case_and_forms_of_characters_do_not_count_and_symbols_do():
    assert normalized(" What\n IS ２＋２ ﬁnally\u00a0? ") == "what is 2+2 finally ?"
    assert normalized("3 * 4") != normalized("3 + 4")


def test_a_conversation_is_found_by_any_message_of_the_user_and_by_the_first_set():
    evaluated = EvaluationPrompts()
    evaluated.add("first", [conversation("Add 2 and 2.", "four", "and 3?")])
    evaluated.add("second", [conversation("add 2  and 2."), conversation("Name a color.")])
    assert evaluated.names == ["first", "second"]
    assert evaluated.find(conversation("hello", "hi", "ADD 2 and 2.", "4")) == 0
    assert evaluated.find(conversation("name a color.", "red")) == 1
    assert evaluated.find(conversation("and 3?", "no")) == -1  # not a first message
    assert evaluated.find(conversation("hello", "Name a color.")) == -1  # the assistant's
    assert EvaluationPrompts().find(conversation("Name a color.")) == -1
