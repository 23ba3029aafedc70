"""Conversations that continue without waiting for each other."""

import json
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import PreTrainedTokenizerFast

from data.conversations.schemas import Conversation
from data.generation.continuous import continuously
from data.generation.regenerate import BLOCK_TURNS, AnswerTurns, regenerate, turn_by_turn
from data.sampling import Sampling
from eagle31.errors import UserError
from tests.data.conversations.chat_templates import CHATML, STRICT, byte_level_tokenizer
from tests.data.generation.tiny_llama import tiny_llama


def _conversation(id: str, num_turns: int) -> Conversation:
    messages = []
    for turn in range(num_turns):
        messages += [{"role": "user", "content": f"{id} {turn}"}, {"role": "assistant", "content": "XXXX"}]
    return Conversation(id, tuple(messages))


CONVERSATIONS = [_conversation(name, turns) for name, turns in zip("abcdef", (1, 4, 2, 3, 1, 4), strict=True)]
NUM_TURNS = 15


class OneAtATime:
    """A generator that answers one random conversation after the other with a small model."""

    engine = "one"

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.model = tiny_llama(tokenizer)
        self.order: list[int] = []
        self.seeds: list[tuple[int, ...]] = []
        self.fails_after = NUM_TURNS + 1
        self.refuses: int | None = None

    @torch.no_grad()
    def answer(self, prompt: Sequence[int]) -> list[int]:
        answer: list[int] = []
        for _ in range(4):
            logits = self.model(input_ids=torch.tensor([[*prompt, *answer]])).logits
            answer.append(int(logits[0, -1].argmax()))
        return answer

    def converse(
        self,
        first: Mapping[int, Sequence[int]],
        sampling: Sampling,
        on_answers: Callable[[Sequence[tuple[int, list[int]]]], None],
        next_prompt: Callable[[int, list[int]], Sequence[int] | None],
        seed: Callable[[int], tuple[int, ...]],
    ) -> dict[int, str]:
        waiting = dict(first)
        refused = {}
        generator = random.Random(len(self.order))
        while waiting:
            index = generator.choice(sorted(waiting))
            if index == self.refuses:
                refused[index] = "it is index " + str(index)
                del waiting[index]
                continue
            self.seeds.append(seed(index))
            ids = self.answer(waiting.pop(index))
            self.order.append(index)
            following = next_prompt(index, ids)
            on_answers([(index, ids)])
            if following is not None:
                waiting[index] = following
            if len(self.order) == self.fails_after:
                raise InterruptedError
        return refused


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return byte_level_tokenizer(CHATML)


@pytest.fixture
def generator(tokenizer: PreTrainedTokenizerFast) -> OneAtATime:
    return OneAtATime(tokenizer)


def _regenerated(
    answer_turns: AnswerTurns,
    tokenizer: PreTrainedTokenizerFast,
    directory: Path,
    conversations: Sequence[Conversation] = CONVERSATIONS,
    block_turns: int = BLOCK_TURNS,
) -> Dataset:
    return regenerate(
        conversations,
        tokenizer,
        answer_turns,
        max_tokens=500,
        template_kwargs={},
        directory=directory,
        on_refused=[].append,
        block_turns=block_turns,
    )


def _continuous(generator: OneAtATime, **changes: Any) -> AnswerTurns:
    settings: dict[str, Any] = {"temperature": 0.0, "model": "the target"} | changes
    sampling = Sampling(4, (2,), settings["temperature"], seed=0)
    return continuously(generator, sampling, settings["model"])


def test_the_samples_are_those_of_answering_turn_by_turn(
    generator: OneAtATime, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    by_turn = turn_by_turn(lambda prompts, _: [generator.answer(prompt) for prompt in prompts])
    expected = _regenerated(by_turn, tokenizer, tmp_path / "turns").to_list()
    assert len(expected) == NUM_TURNS
    assert _regenerated(_continuous(generator), tokenizer, tmp_path / "all").to_list() == expected
    # Some conversation ended before another one began.
    first = {index: generator.order.index(index) for index in set(generator.order)}
    last = {index: NUM_TURNS - 1 - generator.order[::-1].index(index) for index in first}
    assert any(last[one] < first[other] for one in first for other in first)
    assert len(set(generator.seeds)) == NUM_TURNS
    assert Counter(index for _, index, _ in generator.seeds) == Counter(
        {index: len(one.messages) // 2 for index, one in enumerate(CONVERSATIONS)}
    )


@pytest.mark.parametrize("after", [1, 6, 14])
def test_an_interrupted_block_resumes_in_the_middle_of_its_conversations(
    generator: OneAtATime, tokenizer: PreTrainedTokenizerFast, tmp_path: Path, after: int
) -> None:
    whole = _regenerated(_continuous(generator), tokenizer, tmp_path / "whole").to_list()
    generator.order.clear()
    generator.fails_after = after
    with pytest.raises(InterruptedError):
        _regenerated(_continuous(generator), tokenizer, tmp_path / "half")
    [answers] = (tmp_path / "half").glob("*.jsonl")
    assert answers.name == "block-00000-turns.jsonl"
    assert len(answers.read_bytes().splitlines()) == 1 + after
    with answers.open("ab") as file:
        file.write(b'{"index": 1, "tu')  # as a killed process leaves it
    generator.order.clear()
    generator.fails_after = NUM_TURNS + 1
    assert _regenerated(_continuous(generator), tokenizer, tmp_path / "half").to_list() == whole
    assert len(generator.order) == NUM_TURNS - after
    (tmp_path / "half" / "block-00000.arrow").unlink()
    generator.order.clear()
    assert _regenerated(_continuous(generator), tokenizer, tmp_path / "half").to_list() == whole
    assert not generator.order


@pytest.mark.parametrize("without", [None, "block-00000.json"])
def test_damaged_samples_of_a_block_are_written_again_from_the_answers(
    generator: OneAtATime,
    tokenizer: PreTrainedTokenizerFast,
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
    without: str | None,
) -> None:
    whole = _regenerated(_continuous(generator), tokenizer, tmp_path).to_list()
    samples = tmp_path / "block-00000.arrow"
    written = samples.read_bytes()
    place = written.rindex(whole[0]["input_ids"][0].to_bytes(4, "little"))
    samples.write_bytes(written[:place] + b"\x01" + written[place + 1 :])
    if without is not None:
        (tmp_path / without).unlink()
    generator.order.clear()
    assert _regenerated(_continuous(generator), tokenizer, tmp_path).to_list() == whole
    assert not generator.order
    assert ("is damaged; its samples are written again" in capsys.readouterr().err) == (without is None)
    assert samples.read_bytes() == written


def test_every_block_has_seeds_of_its_own(
    generator: OneAtATime, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    whole = _regenerated(_continuous(generator), tokenizer, tmp_path / "whole").to_list()
    generator.seeds.clear()
    generator.order.clear()
    rows = _regenerated(_continuous(generator), tokenizer, tmp_path / "blocks", block_turns=5).to_list()
    assert sorted(row["id"] for row in rows) == sorted(row["id"] for row in whole)
    assert len(set(generator.seeds)) == NUM_TURNS
    assert {block for block, *_ in generator.seeds} == {0, 1, 2}


def test_a_conversation_ends_where_an_engine_refuses_it(
    generator: OneAtATime, tokenizer: PreTrainedTokenizerFast, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    generator.refuses = 1
    rows = _regenerated(_continuous(generator), tokenizer, tmp_path).to_list()
    assert {row["id"].partition("/")[0] for row in rows} == set("acdef")
    assert "1 of 6 conversations were refused:\n  conversation b: it is index 1" in capsys.readouterr().err


def test_conversations_that_the_template_refuses_end_the_run_where_they_are_too_many(tmp_path: Path) -> None:
    tokenizer = byte_level_tokenizer(STRICT)
    messages = _conversation("late", 1).messages
    late = Conversation("late", (*messages, *messages[:1], *messages))  # two user messages in a row
    with pytest.raises(UserError, match="1 of 2 conversations refused"):
        _regenerated(
            _continuous(OneAtATime(tokenizer)), tokenizer, tmp_path, [late, _conversation("good", 1)]
        )


def test_answers_of_other_settings_conversations_and_versions_are_refused(
    generator: OneAtATime, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    _regenerated(_continuous(generator), tokenizer, tmp_path)
    (tmp_path / "block-00000.arrow").unlink()
    for change, name in (({"model": "another"}, "model"), ({"temperature": 1.0}, "temperature")):
        with pytest.raises(UserError, match=f"another {name}"):
            _regenerated(_continuous(generator, **change), tokenizer, tmp_path)
    with pytest.raises(UserError, match="a prompt that the data does not have"):
        _regenerated(_continuous(generator), tokenizer, tmp_path, CONVERSATIONS[1:])
    with pytest.raises(UserError, match="a prompt that the data does not have"):
        _regenerated(_continuous(generator), tokenizer, tmp_path, CONVERSATIONS[:3])
    (tmp_path / "block-00000-turn-000.jsonl").write_text(json.dumps({"format": 2}) + "\n")
    with pytest.raises(UserError, match="An earlier version was interrupted"):
        _regenerated(_continuous(generator), tokenizer, tmp_path)
