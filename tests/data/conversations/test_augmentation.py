from data.conversations.augmentation import AugmentedConversations
from data.conversations.perturbation import UNCHANGED
from data.conversations.schemas import Conversation

CONVERSATIONS = [Conversation(str(i), ({"role": "user", "content": str(i)},)) for i in range(400)]


def test_the_template_of_some_conversations_is_another_one_which_depends_on_id_and_seed():
    changed = list(AugmentedConversations(CONVERSATIONS, 0.3, ["plain", "chatml"], seed=0))
    names = [one.template for one in changed]
    assert 80 < 400 - names.count(UNCHANGED) < 160
    assert min(names.count("plain"), names.count("chatml")) > 30
    assert [(one.id, one.messages) for one in changed] == [(one.id, one.messages) for one in CONVERSATIONS]
    reversed_ = AugmentedConversations(CONVERSATIONS[::-1], 0.3, ["plain", "chatml"], seed=0)
    assert [one.template for one in reversed_][::-1] == names
    other = AugmentedConversations(CONVERSATIONS, 0.3, ["plain", "chatml"], seed=1)
    assert [one.template for one in other] != names
