import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from data.conversations.prompts import render_prompt
from data.conversations.schemas import Conversation
from data.generation.answers import answer_prompts
from data.generation.hf import TransformersGenerator
from data.generation.regenerate import BLOCK_TURNS, regenerate, repeated, turn_by_turn
from data.sampling import Sampling
from eagle31.errors import UserError
from tests.data.conversations.chat_templates import CHATML, STRICT, byte_level_tokenizer
from tests.data.generation.tiny_llama import tiny_llama

MAX_NEW_TOKENS = 10


def conversation(id: str, *turns: tuple[str, str]) -> Conversation:
    return Conversation(id, tuple({"role": role, "content": content} for role, content in turns))


CONVERSATIONS = [
    conversation("one", ("user", "what is two"), ("assistant", "XXXX")),
    conversation(
        "two",
        ("system", "it is four"),
        ("user", "and"),
        ("assistant", "XXXX"),
        ("user", "three"),
        ("assistant", "XXXX"),
        ("user", "never answered"),
    ),
    conversation(
        "three",
        ("user", "six"),
        ("assistant", "XXXX"),
        ("user", "seven"),
        ("assistant", "XXXX"),
        ("assistant", "XXXX"),
    ),
    conversation("another", ("user", "the lazy dog jumps"), ("assistant", "XXXX")),
]
TURNS = {"one": 1, "two": 2, "three": 3, "another": 1}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return byte_level_tokenizer(CHATML)


@pytest.fixture(scope="module")
def model(tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    return tiny_llama(tokenizer)


def answerer(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, **changes: Any
) -> Callable[[list[list[int]], Path], list[list[int]]]:
    settings: dict[str, Any] = {"temperature": 0.0, "model_fingerprint": "the target"} | changes
    sampling = Sampling(MAX_NEW_TOKENS, (tokenizer.eos_token_id,), settings["temperature"], seed=0)
    generator, fingerprint = TransformersGenerator(model, batch_size=2), settings["model_fingerprint"]
    return lambda prompts, output: answer_prompts(
        generator, prompts, sampling, output=output, model_fingerprint=fingerprint
    )


def regenerated(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    directory: Path,
    *,
    max_tokens: int = 500,
    conversations: list[Conversation] = CONVERSATIONS,
    block_turns: int = BLOCK_TURNS,
    **changes: Any,
) -> Dataset:
    return regenerate(
        conversations,
        tokenizer,
        turn_by_turn(answerer(model, tokenizer, **changes)),
        max_tokens=max_tokens,
        template_kwargs={},
        directory=directory,
        on_refused=[].append,
        block_turns=block_turns,
    )


@torch.no_grad()
def greedy(model: PreTrainedModel, prompt: list[int], eos_token_id: int) -> list[int]:
    answer: list[int] = []
    while len(answer) < MAX_NEW_TOKENS and eos_token_id not in answer:
        logits = model(input_ids=torch.tensor([prompt + answer])).logits
        answer.append(int(logits[0, -1].argmax()))
    return answer


def expected(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast
) -> dict[str, tuple[list[int], list[int]]]:
    """Compute (prompt, answer) by the sample's id, one conversation and one token at a time."""
    found = {}
    for conversation in CONVERSATIONS:
        history: list[dict] = []
        turn = 0
        for message in conversation.messages:
            if message["role"] != "assistant":
                history.append(message)
                continue
            prompt = render_prompt(tokenizer, history, None, {})
            answer = greedy(model, prompt, tokenizer.eos_token_id)
            found[f"{conversation.id}/{turn}"] = (prompt, answer)
            completion = tokenizer.decode(answer, skip_special_tokens=True)
            history.append({"role": "assistant", "content": completion})
            turn += 1
    return found


def test_every_turn_is_generated_after_the_targets_earlier_completions(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    dataset = regenerated(model, tokenizer, tmp_path)
    by_id = expected(model, tokenizer)
    assert len(by_id) == sum(TURNS.values())
    assert set(dataset["id"]) == set(by_id)
    for row in dataset:
        prompt, answer = by_id[row["id"]]
        assert row["input_ids"] == [*prompt, *answer]
        assert row["loss_mask"] == [False] * len(prompt) + [True] * len(answer)
        assert row["num_prompt_tokens"] == len(prompt)
        assert "XXXX" not in tokenizer.decode(row["input_ids"])
    # The second turn's prompt contains the first completion.
    [first, second] = [by_id[f"two/{turn}"] for turn in range(2)]
    completion = tokenizer.decode(first[1], skip_special_tokens=True)
    assert completion.strip()
    assert f"<|im_start|>assistant\n{completion}<|im_end|>" in tokenizer.decode(second[0])


def test_an_interrupted_run_resumes_and_repeats_nothing(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = regenerated(model, tokenizer, tmp_path / "whole").to_list()
    names = sorted(path.name for path in (tmp_path / "whole").iterdir())
    answers = [f"block-00000-turn-00{turn}.jsonl" for turn in range(3)]
    assert names == [*answers, "block-00000.arrow", "block-00000.json"]
    lines = (tmp_path / "whole" / answers[0]).read_bytes().splitlines(keepends=True)
    assert len(lines) == 1 + len(CONVERSATIONS)
    (tmp_path / "half").mkdir()
    half = tmp_path / "half" / answers[0]
    half.write_bytes(b"".join(lines[:3]) + lines[3][:9])  # one batch, and an incomplete line
    batch_sizes = []
    generate = model.generate

    def counting(input_ids: torch.Tensor, **options: Any) -> Any:
        batch_sizes.append(len(input_ids))
        return generate(input_ids, **options)

    monkeypatch.setattr(model, "generate", counting)
    assert regenerated(model, tokenizer, tmp_path / "half").to_list() == whole
    assert half.read_bytes().startswith(b"".join(lines[:3]))
    # Two remain in the first turn, two in the second and one in the third.
    assert batch_sizes == [2, 2, 1]
    assert regenerated(model, tokenizer, tmp_path / "half").to_list() == whole
    (tmp_path / "half" / "block-00000.arrow").unlink()
    assert regenerated(model, tokenizer, tmp_path / "half").to_list() == whole
    assert batch_sizes == [2, 2, 1]


def test_the_file_of_answers_names_the_model_and_the_settings(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    regenerated(model, tokenizer, tmp_path)
    for path in tmp_path.glob("*.jsonl"):
        header = json.loads(path.read_text().splitlines()[0])
        assert header["model"] == "the target"
        assert header["temperature"] == 0.0
        assert header["max_new_tokens"] == MAX_NEW_TOKENS
    (tmp_path / "block-00000.arrow").unlink()
    with pytest.raises(UserError, match="another model"):
        regenerated(model, tokenizer, tmp_path, model_fingerprint="another")
    with pytest.raises(UserError, match="another temperature"):
        regenerated(model, tokenizer, tmp_path, temperature=1.0)


def test_long_answers_are_cut_and_prompts_without_room_are_left_out(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    by_id = expected(model, tokenizer)
    # There is room for two tokens after the first turn's prompt, and for none after the second's.
    max_tokens = len(by_id["two/0"][0]) + 2
    rows = {row["id"]: row for row in regenerated(model, tokenizer, tmp_path, max_tokens=max_tokens)}
    assert "two/1" not in rows
    for name, row in rows.items():
        prompt, answer = by_id[name]
        assert row["input_ids"] == [*prompt, *answer][:max_tokens]
        assert row["loss_mask"] == ([False] * len(prompt) + [True] * len(answer))[:max_tokens]
    assert len(rows["two/0"]["input_ids"]) == max_tokens
    assert len(by_id["two/0"][1]) > 2
    nothing = regenerated(model, tokenizer, tmp_path / "none", max_tokens=2)
    assert len(nothing) == 0
    assert nothing.column_names == ["id", "input_ids", "loss_mask", "num_prompt_tokens"]


def test_a_few_conversations_that_the_template_refuses_are_left_out_and_reported(
    model: PreTrainedModel, tmp_path: Path
) -> None:
    tokenizer = byte_level_tokenizer(STRICT)
    bad = conversation("bad", ("user", "six"), ("user", "seven"), ("assistant", "XXXX"))
    good = [conversation(str(i), ("user", "six"), ("assistant", "XXXX")) for i in range(100)]
    reported: list[list[tuple[str, str]]] = []

    def answer(prompts: list[list[int]], _output: Path) -> list[list[int]]:
        return [[5, 6]] * len(prompts)

    rest: dict[str, Any] = {"max_tokens": 500, "template_kwargs": {}, "on_refused": reported.append}
    dataset = regenerate([bad, *good], tokenizer, turn_by_turn(answer), directory=tmp_path, **rest)
    assert len(dataset) == len(good)
    [[(name, _reason)]] = reported
    assert name == "bad"
    with pytest.raises(UserError, match="1 of 2 conversations refused"):
        regenerate([bad, good[0]], tokenizer, turn_by_turn(answer), directory=tmp_path / "two", **rest)
    with pytest.raises(UserError, match="1 of 3 conversations refused"):
        regenerate(
            [*good[:2], bad], tokenizer, turn_by_turn(answer), directory=tmp_path / "3", block_turns=2, **rest
        )


def test_a_conversation_ends_where_the_target_has_no_answer(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    generate = answerer(model, tokenizer)

    def answer(prompts: list[list[int]], output: Path) -> list[list[int]]:
        answers = generate(prompts, output)
        return [[], []] if len(prompts) == 2 else answers  # two prompts are those of the second turn

    rest: dict[str, Any] = {"max_tokens": 500, "template_kwargs": {}, "on_refused": [].append}
    rows = regenerate(CONVERSATIONS, tokenizer, turn_by_turn(answer), directory=tmp_path, **rest)
    masks = {row["id"]: sum(row["loss_mask"]) for row in rows}
    assert masks.keys() == {f"{name}/0" for name in TURNS}
    assert all(length >= 2 for length in masks.values())


@pytest.mark.parametrize("block_turns", [1, 3])
def test_blocks_hold_the_same_samples_as_all_at_once(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, tmp_path: Path, block_turns: int
) -> None:
    whole = regenerated(model, tokenizer, tmp_path / "whole").to_list()
    rows = regenerated(model, tokenizer, tmp_path / "blocks", block_turns=block_turns).to_list()
    assert sorted(rows, key=lambda row: row["id"]) == sorted(whole, key=lambda row: row["id"])
    # The conversations have 1, 2, 3 and 1 turns.
    assert len(list((tmp_path / "blocks").glob("*.arrow"))) == {1: 4, 3: 3}[block_turns]


def test_each_conversation_is_answered_several_times_independently(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    copies = list(repeated(CONVERSATIONS, 3))
    assert [one.id for one in copies[:4]] == ["one", "one~1", "one~2", "two"]
    rows = regenerated(model, tokenizer, tmp_path, conversations=copies, temperature=3.0)
    by_id = {row["id"]: row for row in rows}
    assert by_id.keys() >= {f"{name}{copy}/0" for name in TURNS for copy in ("", "~1", "~2")}
    # A second turn follows its own copy's first one.
    firsts, seconds = ([by_id[f"two{copy}/{turn}"] for copy in ("", "~1", "~2")] for turn in range(2))
    answers = [tokenizer.decode(row["input_ids"][row["num_prompt_tokens"] :]) for row in firsts]
    assert len(set(answers)) == 3
    assert len({tuple(row["input_ids"][: row["num_prompt_tokens"]]) for row in seconds}) == 3


def test_an_interrupted_block_resumes_after_the_finished_ones(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = regenerated(model, tokenizer, tmp_path / "whole", block_turns=3).to_list()
    generate, num_calls = model.generate, 0

    def failing(*arguments: Any, **options: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 4:  # the first block takes two
            raise InterruptedError
        return generate(*arguments, **options)

    monkeypatch.setattr(model, "generate", failing)
    with pytest.raises(InterruptedError):
        regenerated(model, tokenizer, tmp_path / "half", block_turns=3)
    assert [path.name for path in (tmp_path / "half").glob("*.arrow")] == ["block-00000.arrow"]
    assert regenerated(model, tokenizer, tmp_path / "half", block_turns=3).to_list() == whole


def test_no_more_is_answered_than_max_samples_needs(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    """One answer in four is too short, which the next block makes good."""
    conversations = [
        conversation(str(i), ("user", "six"), ("assistant", "X"), ("user", "ten"), ("assistant", "X"))
        for i in range(400)
    ]
    num_prompts = 0

    def answer(prompts: list[list[int]], _output: Path) -> list[list[int]]:
        nonlocal num_prompts
        num_prompts += len(prompts)
        return [[5] if i % 4 == 3 else [5, 6] for i in range(len(prompts))]

    rest: dict[str, Any] = {"max_tokens": 500, "template_kwargs": {}, "on_refused": [].append}
    rows = regenerate(
        conversations, tokenizer, turn_by_turn(answer), directory=tmp_path, max_samples=300, **rest
    )
    assert 300 <= len(rows) <= 304
    assert num_prompts <= 300 * 4 / 3 + 8
    assert max(int(row["id"].partition("/")[0]) for row in rows) < (300 * 4 / 3 + 8) / 2
