"""Where the target writes a user's message, and which of its prompts are used."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from data.generation.answers import AnswerGenerator
from data.generation.hf import TransformersGenerator
from data.generation.self_prompts import user_turn, write_self_prompts
from data.sampling import Sampling
from eagle31.errors import UserError
from eagle31.json_files import read_jsonl
from tests.data.conversations.chat_templates import (
    CHATML,
    HEADERS,
    INSTRUCTIONS,
    PLAIN,
    STRICT,
    THINKING,
    byte_level_tokenizer,
    sentencepiece_tokenizer,
)
from tests.data.generation.generators import OneAtATime, tiny_llama

BEGUN = "<|im_start|>user\n"
HEADER = "<|start_header_id|>{}<|end_header_id|>\n\n"


@pytest.mark.parametrize(
    ("template", "system_prompt", "prompt", "end"),
    [
        (CHATML, None, BEGUN, "<|im_end|>"),
        (CHATML, "Be brief.", f"<|im_start|>system\nBe brief.<|im_end|>\n{BEGUN}", "<|im_end|>"),
        (THINKING, None, BEGUN, "<|im_end|>"),
        (HEADERS, None, f"<|begin_of_text|>{HEADER.format('user')}", "<|eot_id|>"),
        # As DeepSeek's templates: the assistant's turn ends that of the user.
        (
            "<|im_start|>{{ messages[0].content }}{% if add_generation_prompt %}<|eot_id|>{% endif %}",
            None,
            "<|im_start|>",
            "<|eot_id|>",
        ),
    ],
)
def test_the_target_reads_what_is_before_a_users_message_and_stops_at_its_end(
    template: str, system_prompt: str | None, prompt: str, end: str
) -> None:
    tokenizer = byte_level_tokenizer(template, eos_token="<|end_header_id|>")
    eos = tokenizer.eos_token_id
    turn = user_turn(tokenizer, system_prompt, {}, (eos,))
    assert turn.prompt == tokenizer(prompt, add_special_tokens=False)["input_ids"]
    assert set(turn.stop_token_ids) == {eos, tokenizer.convert_tokens_to_ids(end)}


MESSAGE = "{{ messages[-1].content }}<|im_end|>"


@pytest.mark.parametrize(
    ("tokenizer", "system_prompt", "says"),
    [
        (byte_level_tokenizer(PLAIN), None, "no special token at the end"),
        (byte_level_tokenizer("<|im_start|>{{ messages[0].content }}"), None, "no special token at the end"),
        (sentencepiece_tokenizer(INSTRUCTIONS), None, "no special token at the end"),
        (byte_level_tokenizer(MESSAGE), None, "nothing before"),
        (byte_level_tokenizer(MESSAGE + MESSAGE), None, "2 times"),
        (byte_level_tokenizer("<|im_start|>hello<|im_end|>"), None, "0 times"),
        (byte_level_tokenizer(STRICT), "Be brief.", "roles must alternate"),
    ],
)
def test_a_template_without_a_place_for_the_users_message_is_refused(
    tokenizer: PreTrainedTokenizerFast, system_prompt: str | None, says: str
) -> None:
    with pytest.raises(UserError, match=rf"data\.train=self: .*{says}"):
        user_turn(tokenizer, system_prompt, {}, ())


def written(
    tokenizer: PreTrainedTokenizerFast, generator: AnswerGenerator, output: Path, num: int, **changes: object
) -> list[dict]:
    turn = user_turn(tokenizer, None, {}, (tokenizer.eos_token_id,))
    sampling = Sampling(max_new_tokens=12, stop_token_ids=turn.stop_token_ids, temperature=1.0, seed=0)
    settings = {"system_prompt": None, "model_fingerprint": "f"} | changes
    write_self_prompts(generator, tokenizer, turn, sampling, num=num, output=output, **settings)
    return read_jsonl(output)


def saying(
    tokenizer: PreTrainedTokenizerFast, texts: Sequence[str], fails_after: int | None = None
) -> OneAtATime:
    """Return a generator whose answers are these texts."""
    ids: Iterator[list[int]] = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts)
    return OneAtATime(lambda _: next(ids), fails_after=fails_after)


def test_prompts_that_end_with_text_are_used_once_and_without_special_tokens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer, end = byte_level_tokenizer(CHATML), "<|im_end|>"
    texts = [f" what is two?\n{end}", f"and three{end}", "it has no", end, f"\n{end}", f"what is two?{end}"]
    texts += [f"the <|eot_id|> dog{end}", ""]
    rows = written(tokenizer, saying(tokenizer, texts), tmp_path / "p.jsonl", 8, system_prompt="Be brief.")
    assert [[message["role"] for message in row["messages"]] for row in rows] == [["system", "user"]] * 2
    assert {row["messages"][0]["content"] for row in rows} == {"Be brief."}
    assert {row["messages"][1]["content"] for row in rows} == {"what is two?", "and three"}
    assert len({row["id"] for row in rows}) == 2
    printed = capsys.readouterr().out
    assert printed.startswith("data: 2 of 8 prompts of the target are used")
    for reason in ("2 have no end", "2 are empty", "1 repeat another", "1 have special tokens"):
        assert reason in printed


def test_a_target_without_a_prompt_that_can_be_used_is_refused(tmp_path: Path) -> None:
    tokenizer = byte_level_tokenizer(CHATML)
    with pytest.raises(UserError, match=r"data\.train=self: .*None of 2 prompts can be used, 2 have no end"):
        written(tokenizer, saying(tokenizer, ["the", "dog"]), tmp_path / "p.jsonl", 2)
    assert not (tmp_path / "p.jsonl").exists()


def test_prompts_that_are_written_survive_an_interruption(tmp_path: Path) -> None:
    tokenizer, output = byte_level_tokenizer(CHATML), tmp_path / "p.jsonl"
    texts = [f"{word}<|im_end|>" for word in ("dog", "fox", "jumps", "over", "lazy")]
    with pytest.raises(InterruptedError):
        written(tokenizer, saying(tokenizer, texts, fails_after=2), output, 5)
    assert not output.exists()
    second = saying(tokenizer, texts[2:])
    rows = written(tokenizer, second, output, 5)
    assert len(second.order) == 3
    assert {row["messages"][0]["content"] for row in rows} == {"dog", "fox", "jumps", "over", "lazy"}


def test_each_prompt_is_sampled_by_itself(tmp_path: Path) -> None:
    """The same tokens begin all of them, so that only the seeds differ."""
    tokenizer = byte_level_tokenizer(CHATML)
    generator = TransformersGenerator(tiny_llama(tokenizer), batch_size=4)
    rows = written(tokenizer, generator, tmp_path / "p.jsonl", 12)
    assert len(rows) > 6
    again = written(tokenizer, generator, tmp_path / "again.jsonl", 12)
    assert again == rows
