from data.conversations.schemas import Conversation
from data.conversations.split import choose_prompts, first_prompt


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


def test_all_prompts_are_chosen_if_there_are_fewer_than_requested():
    data = conversations("a", "b", "a")
    assert sorted(first_prompt(c) for c in choose_prompts(data, 8, seed=0)) == ["a", "b"]


def test_the_prompt_is_only_the_first_user_message():
    messages = ("system", "s"), ("user", "first"), ("assistant", "a"), ("user", "second")
    later = Conversation("x", tuple({"role": role, "content": content} for role, content in messages))
    assert first_prompt(later) == "first"
