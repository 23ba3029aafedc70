import pytest

from data.text.schemas import Conversation
from data.text.split import choose_prompts, drop_prompts, first_prompt, held_out_split
from eagle31.errors import UserError


def conversations(*prompts: str) -> list[Conversation]:
    return [
        Conversation(
            f"{prompt}{i}", ({"role": "system", "content": "s"}, {"role": "user", "content": prompt})
        )
        for i, prompt in enumerate(prompts)
    ]


def test_the_same_prompt_is_never_on_both_sides():
    data = conversations(*(f"p{i % 30}" for i in range(90)))
    train, held_out = held_out_split(data, 10, seed=0)
    assert len({first_prompt(c) for c in held_out}) == 10
    assert not {first_prompt(c) for c in held_out} & {first_prompt(c) for c in train}
    assert sorted(c.id for c in train + held_out) == sorted(c.id for c in data)
    assert train == [c for c in data if c in train]


def test_the_split_depends_only_on_texts_and_seed():
    data = conversations(*(f"p{i}" for i in range(50)))
    held_out = {first_prompt(c) for c in held_out_split(data, 8, seed=0)[1]}
    assert {first_prompt(c) for c in held_out_split(data[::-1], 8, seed=0)[1]} == held_out
    assert {first_prompt(c) for c in held_out_split(data, 8, seed=1)[1]} != held_out


def test_holding_out_every_prompt_is_a_user_error():
    with pytest.raises(UserError, match="hold out fewer"):
        held_out_split(conversations("a", "a", "b"), 2, seed=0)


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


def test_choosing_and_holding_out_select_the_same_prompts():
    data = conversations(*(f"p{i}" for i in range(50)))
    held_out = held_out_split(data, 8, seed=0)[1]
    assert {c.id for c in choose_prompts(data, 8, seed=0)} == {c.id for c in held_out}


def test_held_out_prompts_are_dropped_and_the_order_is_kept():
    data = conversations(*(f"p{i % 10}" for i in range(30)))
    held_out = conversations("p3", "p7", "unseen")
    kept = drop_prompts(data, held_out)
    assert kept == [c for c in data if first_prompt(c) not in ("p3", "p7")]
    assert len(kept) == 24
    assert drop_prompts(data, []) == data


def test_the_prompt_is_only_the_first_user_message():
    messages = ("system", "s"), ("user", "first"), ("assistant", "a"), ("user", "second")
    later = Conversation("x", tuple({"role": role, "content": content} for role, content in messages))
    assert first_prompt(later) == "first"
    assert drop_prompts([later], conversations("second")) == [later]
    assert drop_prompts([later], conversations("first")) == []
