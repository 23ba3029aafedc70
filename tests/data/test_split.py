import pytest

from data.conversations import Conversation
from data.split import first_prompt, held_out_split
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


def test_the_choice_depends_on_text_and_seed_only():
    data = conversations(*(f"p{i}" for i in range(50)))
    held_out = {first_prompt(c) for c in held_out_split(data, 8, seed=0)[1]}
    assert {first_prompt(c) for c in held_out_split(data[::-1], 8, seed=0)[1]} == held_out
    assert {first_prompt(c) for c in held_out_split(data, 8, seed=1)[1]} != held_out


def test_something_is_left_to_train_on():
    with pytest.raises(UserError, match="hold fewer out"):
        held_out_split(conversations("a", "a", "b"), 2, seed=0)
