from collections import Counter
from dataclasses import replace

from data.conversations.augmentation import Augmentation, AugmentedConversations, document_of
from data.conversations.perturbation import SYSTEM_PROMPTS, UNCHANGED
from data.conversations.schemas import Conversation
from tests.data.conversations import chat_templates as templates
from tests.data.conversations.chat_templates import byte_level_tokenizer

NONE = Augmentation(0, ["plain", "renamed_roles"], 0, ["none", "short"], 0, 20, seed=0)
CONVERSATIONS = [
    Conversation(
        f"id-{number}",
        (
            {"role": "user", "content": f"what is {number}"},
            {"role": "assistant", "content": f"it is {number}"},
        ),
    )
    for number in range(400)
]


def changed(augmentation: Augmentation, conversations=CONVERSATIONS) -> list[Conversation]:
    tokenizer = byte_level_tokenizer(templates.CHATML, "<|im_end|>")
    return list(AugmentedConversations(conversations, augmentation, tokenizer))


def test_each_change_is_made_as_often_as_its_probability_says():
    of_template = changed(replace(NONE, template_probability=0.3))
    names = Counter(one.template for one in of_template)
    assert names.keys() == {UNCHANGED, "plain", "renamed_roles"}
    assert 80 < names["plain"] + names["renamed_roles"] < 160
    assert [one.messages for one in of_template] == [one.messages for one in CONVERSATIONS]
    of_system = changed(replace(NONE, system_probability=0.5, systems=["short"]))
    systems = [one.messages[0] for one in of_system if one.messages[0]["role"] == "system"]
    assert 150 < len(systems) < 250
    assert {message["content"] for message in systems} == {SYSTEM_PROMPTS["short"]}


def test_documents_come_before_the_question_and_are_those_of_other_conversations():
    found = changed(replace(NONE, documents_probability=0.5))
    longer = [(one, of) for one, of in zip(found, CONVERSATIONS, strict=True) if one.messages != of.messages]
    assert 150 < len(longer) < 250
    texts = {document_of(one) for one in CONVERSATIONS}
    for one, of in longer:
        question = of.messages[0]["content"]
        *documents, rest = one.messages[0]["content"].split("\n\nwhat is ")
        assert question == f"what is {rest}"
        assert documents
        assert any(text.startswith(documents[0][:10]) for text in texts - {document_of(of)})
        assert one.messages[1:] == of.messages[1:]


def test_a_conversation_is_changed_alike_in_any_order_and_one_change_does_not_move_another():
    template = replace(NONE, template_probability=0.5)
    both = replace(template, system_probability=1.0, systems=["short"])
    by_id = {one.id: one for one in changed(template)}
    assert {one.id: one for one in changed(template, CONVERSATIONS[::-1])} == by_id
    assert [one.template for one in changed(both)] == [by_id[one.id].template for one in CONVERSATIONS]
    other_seed = [one.template for one in changed(replace(template, seed=1))]
    assert other_seed != [one.template for one in changed(template)]


def test_no_probability_changes_nothing():
    assert changed(NONE) == CONVERSATIONS
