"""The target's turns in place of the recorded ones."""

import os
import re
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from data.conversations.prompts import render_prompt
from data.conversations.schemas import Conversation
from data.generation.answers import AnswerGenerator
from data.generation.dialogue import OVERLONG
from data.generation.hf import TransformersGenerator
from data.generation.regenerate import first_drivers_answers, regenerate
from data.sampling import Sampling
from eagle31.errors import UserError
from tests.data.conversations.chat_templates import CHATML, STRICT, byte_level_tokenizer
from tests.data.generation.generators import OneAtATime, greedy, tiny_llama

MAX_NEW_TOKENS = 6


def conversation(id: str, *turns: tuple[str, str]) -> Conversation:
    return Conversation(id, tuple({"role": role, "content": content} for role, content in turns))


ANSWER = ("assistant", "XXXX")
CONVERSATIONS = [
    conversation("one", ("user", "what is two"), ANSWER),
    conversation(
        "two",
        ("system", "it is four"),
        ("user", "and"),
        ANSWER,
        ("user", "three"),
        ANSWER,
        ("user", "no answer yet"),
    ),
    conversation("three", ("user", "six"), ANSWER, ("user", "seven"), ANSWER, ANSWER),
    conversation("another", ("user", "the lazy dog jumps"), ANSWER),
]
TURNS = {"one": 1, "two": 3, "three": 3, "another": 1}
NUM_TURNS = sum(TURNS.values())


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return byte_level_tokenizer(CHATML)


@pytest.fixture(scope="module")
def model(tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    return tiny_llama(tokenizer)


def one_at_a_time(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, **settings: Any) -> OneAtATime:
    stops = [tokenizer.eos_token_id]
    return OneAtATime(lambda prompt: greedy(model, prompt, stops, MAX_NEW_TOKENS), **settings)


def never(path: Path) -> None:
    raise AssertionError(f"There is no other driver that would write {path}.")


def regenerated(
    generator: AnswerGenerator,
    tokenizer: PreTrainedTokenizerFast,
    directory: Path,
    conversations: Sequence[Conversation] = CONVERSATIONS,
    temperature: float = 0.0,
    **settings: Any,
) -> Dataset:
    sampling = Sampling(MAX_NEW_TOKENS, (tokenizer.eos_token_id,), temperature, seed=0)
    given: dict[str, Any] = {"max_tokens": 500, "template_kwargs": {}}
    given |= {"directory": directory, "model_fingerprint": "f", "wait_for": never} | settings
    return regenerate(conversations, tokenizer, generator, sampling, **given)


def expected(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast
) -> dict[str, tuple[list[int], list[int]]]:
    """Compute (prompt, answer) by the sample's id, one conversation and one token at a time."""
    found = {}
    for conversation in CONVERSATIONS:
        history: list[dict] = []
        turn = 0
        for message, following in zip_longest(conversation.messages, conversation.messages[1:]):
            if message["role"] != "assistant":
                history.append(message)
                if following is not None:
                    continue
            prompt = render_prompt(tokenizer, history, None, {})
            answer = greedy(model, prompt, [tokenizer.eos_token_id], MAX_NEW_TOKENS)
            found[f"{conversation.id}/{turn}"] = (prompt, answer)
            completion = tokenizer.decode(answer, skip_special_tokens=True)
            history.append({"role": "assistant", "content": completion})
            turn += 1
    return found


@pytest.mark.parametrize("in_batches", [True, False])
def test_every_turn_is_generated_after_the_targets_earlier_completions(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    tmp_path: Path,
    in_batches: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    synced: list[str] = []
    monkeypatch.setattr("os.fsync", lambda number: synced.append(os.readlink(f"/proc/self/fd/{number}")))
    one = one_at_a_time(model, tokenizer)
    generator = TransformersGenerator(model, 2) if in_batches else one
    dataset = regenerated(generator, tokenizer, tmp_path, block_turns=100 if in_batches else 3)
    by_id = expected(model, tokenizer)
    for id, (prompt, answer) in by_id.items():
        rows = [row for row in dataset if row["id"].partition("/")[0] == id.partition("/")[0]]
        end = len(prompt) + len(answer)
        [row] = [row for row in rows if row["input_ids"][:end] == [*prompt, *answer]][:1]
        assert all(row["loss_mask"][len(prompt) : end])
        assert row["num_prompt_tokens"] <= len(prompt)
    assert sum(map(sum, dataset["loss_mask"])) == sum(len(answer) for _, answer in by_id.values())
    # The second turn's prompt contains the first completion.
    completion = tokenizer.decode(by_id["two/0"][1], skip_special_tokens=True)
    assert completion.strip()
    assert f"<|im_start|>assistant\n{completion}<|im_end|>" in tokenizer.decode(by_id["two/1"][0])
    assert len(set(one.seeds)) == (0 if in_batches else NUM_TURNS)
    # The conversations have 1, 3, 3 and 1 turns.
    assert len(list(tmp_path.glob("*.arrow"))) == (1 if in_batches else 3)
    assert sum(".arrow" in file for file in synced) == (1 if in_batches else 3)


def test_sampled_batches_are_the_same_after_an_interruption(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings: dict[str, Any] = {"temperature": 2.0, "block_turns": 6}
    whole = regenerated(TransformersGenerator(model, 2), tokenizer, tmp_path / "whole", **settings).to_list()
    generate = model.generate
    for after in (1, 3):
        calls = iter(range(after))

        def failing(*arguments: Any, calls: Any = calls, **options: Any) -> Any:
            if next(calls, None) is None:
                raise InterruptedError
            return generate(*arguments, **options)

        directory = tmp_path / str(after)
        monkeypatch.setattr(model, "generate", failing)
        with pytest.raises(InterruptedError):
            regenerated(TransformersGenerator(model, 2), tokenizer, directory, **settings)
        monkeypatch.setattr(model, "generate", generate)
        rows = regenerated(TransformersGenerator(model, 2), tokenizer, directory, **settings).to_list()
        assert rows == whole


def test_long_answers_are_cut_and_prompts_without_room_are_left_out(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    generator, by_id = one_at_a_time(model, tokenizer), expected(model, tokenizer)
    # There is room for two tokens after the first turn's prompt, and for none after the second's.
    max_tokens = len(by_id["two/0"][0]) + 2
    rows = {row["id"]: row for row in regenerated(generator, tokenizer, tmp_path, max_tokens=max_tokens)}
    assert "two/1" not in rows
    assert len(by_id["two/0"][1]) > 2
    assert rows["two/0"]["input_ids"] == [*by_id["two/0"][0], *by_id["two/0"][1]][:max_tokens]


def test_turns_that_continue_the_one_before_are_one_sample(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    stop = tokenizer.eos_token_id
    generator = OneAtATime(lambda prompt: [70, 71, stop])
    ten = conversation("ten", *(("user", "six"), ANSWER) * 10)
    [row] = regenerated(generator, tokenizer, tmp_path, [ten])
    assert row["id"] == "ten/0"
    assert sum(row["loss_mask"]) == 30
    supervised = [id for id, mask in zip(row["input_ids"], row["loss_mask"], strict=True) if mask]
    assert supervised == [70, 71, stop] * 10
    # Tokens that are not those of their text are no start of a prompt.
    generator = OneAtATime(lambda prompt: [*tokenizer("\n")["input_ids"] * 2, stop])
    rows = regenerated(generator, tokenizer, tmp_path / "other", [ten])
    assert rows["id"][:] == [f"ten/{turn}" for turn in range(10)]


def test_prompts_without_room_are_a_user_error_with_the_limit_that_keeps_nine_tenths(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    some = [conversation(str(i), ("user", "six " * i), ANSWER) for i in range(100)]

    def num_kept(max_tokens: int) -> int:
        generator, directory = OneAtATime(lambda prompt: [70, 1]), tmp_path / str(max_tokens)
        return len(regenerated(generator, tokenizer, directory, some, max_tokens=max_tokens))

    with pytest.raises(UserError, match=r"data\.max_tokens=30: .*no room") as caught:
        num_kept(30)
    (enough,) = re.findall(r"data.max_tokens=(\d+) keeps", caught.value.remedy)
    assert num_kept(int(enough)) == 90
    assert f"10 conversations end where {OVERLONG}" in capsys.readouterr().err
    with pytest.raises(UserError, match="no room"):
        num_kept(int(enough) - 1)


def test_a_few_conversations_that_the_template_refuses_are_left_out_and_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = byte_level_tokenizer(STRICT)
    generator = OneAtATime(lambda prompt: [70, 1])
    bad = conversation("bad", ("user", "six"), ANSWER, ("system", "six"), ("user", "seven"), ANSWER)
    good = [conversation(str(i), ("user", "six"), ANSWER) for i in range(5)]
    for _ in range(2):  # the second run reads a finished block
        dataset = regenerated(generator, tokenizer, tmp_path, [bad, *good])
        assert len(dataset) == 1 + len(good)
        assert "data: 1 conversations are rejected by the chat template and left out:\n  bad: " in (
            capsys.readouterr().out
        )
    with pytest.raises(UserError, match="2 of 3 conversations refused"):
        regenerated(generator, tokenizer, tmp_path / "three", [good[0], bad, bad], block_turns=2)


def test_an_answer_that_repeats_itself_is_left_out_and_counted(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loop, stop = [*range(40, 100), 70, 71], tokenizer.eos_token_id
    looping = [5, *(loop * 5)[:256], stop]
    for number, answer in enumerate((looping, looping[:-1], [*looping[:2], *looping[3:]], [70, stop])):
        answers = iter([[70, stop], answer])  # of the first turn, and of the second
        generator = OneAtATime(lambda prompt, answers=answers: next(answers))
        two = conversation("two", ("user", "six"), ANSWER, ("user", "seven"), ANSWER)
        rows = regenerated(generator, tokenizer, tmp_path / str(number), [two])
        assert sum(map(sum, rows["loss_mask"])) == 2 + len(answer) * (number >= 2)
        assert ("1 conversations end where an answer repeats itself" in capsys.readouterr().err) == (
            number < 2
        )


def test_a_conversation_ends_where_the_target_has_no_answer(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    def answer(prompt: Sequence[int]) -> list[int]:
        return [70, 1] if tokenizer.decode(prompt).count("assistant") == 1 else []

    rows = regenerated(OneAtATime(answer), tokenizer, tmp_path / "empty")
    assert set(rows["id"]) == {f"{name}/0" for name in TURNS}
    # The longest conversation is the first of its block.
    rows = regenerated(OneAtATime(lambda prompt: [70, 1], refuses=[0]), tokenizer, tmp_path / "refused")
    assert {id.partition("/")[0] for id in rows["id"]} == TURNS.keys() - {"two"}


def test_no_more_is_answered_than_max_samples_needs(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    """One answer in four is too short, which the next block makes good."""
    some = [conversation(str(i), ("user", "six"), ANSWER, ("user", "ten"), ANSWER) for i in range(400)]
    generator = OneAtATime(lambda prompt: [70, 1] if len(generator.order) % 4 else [1])
    rows = regenerated(generator, tokenizer, tmp_path, some, max_samples=300)
    assert 300 <= len(rows) <= 310
    assert max(int(row["id"].partition("/")[0]) for row in rows) < 350


def test_the_progress_of_the_first_driver_counts_its_own_blocks() -> None:
    found = [first_drivers_answers(number, 100, 2) for number in (-40, 0, 60, 100, 240, 400)]
    assert found == [0, 0, 60, 100, 200, 200]
