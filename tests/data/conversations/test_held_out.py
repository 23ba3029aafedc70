from data.conversations.held_out import EvaluationPrompts, choose_prompts, first_prompt
from data.conversations.schemas import Conversation
from tests.data.conversations.jsonl_files import conversation


def conversations(*prompts: str) -> list[Conversation]:
    return [
        Conversation(
            f"{prompt}{i}", ({"role": "system", "content": "s"}, {"role": "user", "content": prompt})
        )
        for i, prompt in enumerate(prompts)
    ]


def test_chosen_prompts_differ_and_depend_only_on_texts_and_seed():
    data = conversations(*(f"p{i % 20}" for i in range(60)))
    chosen = choose_prompts(data, 8, seed=0)
    prompts = [first_prompt(c) for c in chosen]
    assert len(set(prompts)) == len(prompts) == 8
    # The first of the conversations with the same prompt is chosen.
    assert all(c is next(d for d in data if first_prompt(d) == first_prompt(c)) for c in chosen)
    assert [first_prompt(c) for c in choose_prompts(data[::-1], 8, seed=0)] == prompts
    assert [first_prompt(c) for c in choose_prompts(data, 8, seed=1)] != prompts
    # A larger choice begins with a smaller one, so that a higher num_test keeps the earlier prompts.
    assert choose_prompts(data, 5, seed=0) == chosen[:5]


def test_the_prompt_is_only_the_first_user_message():
    messages = ("system", "s"), ("user", "first"), ("assistant", "a"), ("user", "second")
    later = Conversation("x", tuple({"role": role, "content": content} for role, content in messages))
    assert first_prompt(later) == "first"


def test_an_evaluation_prompt_is_found_in_any_message_of_the_user_whatever_its_spaces_and_case():
    evaluated = EvaluationPrompts()
    evaluated.add("first", [conversation("x", "Add ２ and ﬁve.", "four", "and 3?")])
    evaluated.add("second", [conversation("x", "add 2  and five."), conversation("x", "Name a color.")])
    assert evaluated.find(conversation("x", "hello", "hi", "ADD 2 and five.", "4")) == 0
    assert evaluated.find(conversation("x", "name a\u00a0color.", "red")) == 1
    assert evaluated.find(conversation("x", "and 3?", "no")) == -1  # not a first message
    assert evaluated.find(conversation("x", "hello", "Name a color.")) == -1  # the assistant's
    assert EvaluationPrompts().find(conversation("x", "Name a color.")) == -1
