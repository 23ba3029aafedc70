import numpy as np
import pytest

from data.conversations.held_out import (
    RANK,
    EvaluationPrompts,
    choose_prompts,
    first_prompt,
    held_out_prompts,
    prompt_rank,
)
from data.conversations.mixing import Share, chosen_mixture
from data.conversations.schemas import Conversation
from eagle31.errors import UserError
from tests.data.conversations.jsonl_files import conversation

SOURCES = np.repeat(np.arange(3, dtype=np.int32), [100, 40, 200])


def ranks(prompts: list[str], seed: int = 0) -> np.ndarray:
    return np.frombuffer(b"".join(prompt_rank(prompt, seed) for prompt in prompts), RANK)


def test_holding_out_every_prompt_is_a_user_error():
    with pytest.raises(UserError, match=r"or lower data\.num_validation"):
        held_out_prompts(ranks(["a", "a", "b"]), 2)


def counts(**shares: Share) -> list[int]:
    chosen = chosen_mixture(SOURCES, shares, seed=0)
    assert chosen.tolist() == sorted(set(chosen.tolist()))
    return np.bincount(SOURCES[chosen], minlength=3).tolist()


def test_weights_are_the_proportions_of_the_largest_choice_without_repetition():
    assert counts(a=Share(), b=Share(), c=Share()) == [100, 40, 200]
    assert counts(a=Share(1.0), b=Share(1.0), c=Share(1.0)) == [40, 40, 40]
    assert counts(a=Share(0.2), b=Share(0.1), c=Share(0.5)) == [80, 40, 200]
    assert counts(a=Share(3.0), b=Share(1.0), c=Share(6.0)) == [100, 33, 200]
    assert counts(a=Share(1.0, max_conversations=10), b=Share(2.0), c=Share(1.0)) == [10, 20, 10]


def test_limits_choose_at_random_and_a_larger_one_keeps_what_a_smaller_one_chose():
    assert counts(a=Share(max_conversations=30), b=Share(), c=Share(max_conversations=500)) == [30, 40, 200]
    few, more, other = (
        set(chosen_mixture(SOURCES, {"a": Share(max_conversations=n), "b": Share(), "c": Share()}, seed))
        for n, seed in ((30, 0), (60, 0), (30, 1))
    )
    assert few < more
    assert few != other
    assert max(i for i in few if i < 100) > 35


def test_a_weight_of_which_nothing_is_left_is_a_user_error():
    with pytest.raises(
        UserError, match=r"No conversation of a would be used, because b has only 40"
    ) as caught:
        counts(a=Share(0.001), b=Share(1.0), c=Share(1.0))
    assert caught.value.field == "data.sources.a.weight"


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


def test_an_evaluation_prompt_is_found_in_any_message_of_the_user_whatever_its_spaces_and_case():
    evaluated = EvaluationPrompts()
    evaluated.add("first", [conversation("x", "Add ２ and ﬁve.", "four", "and 3?")])
    evaluated.add("second", [conversation("x", "add 2  and five."), conversation("x", "Name a color.")])
    assert evaluated.find(conversation("x", "hello", "hi", "ADD 2 and five.", "4")) == 0
    assert evaluated.find(conversation("x", "name a\u00a0color.", "red")) == 1
    assert evaluated.find(conversation("x", "and 3?", "no")) == -1  # not a first message
    assert evaluated.find(conversation("x", "hello", "Name a color.")) == -1  # the assistant's
    assert EvaluationPrompts().find(conversation("x", "Name a color.")) == -1
