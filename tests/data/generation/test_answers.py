"""The file of answers, whoever writes them."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from data.generation.answers import answer_prompts, answers_dataset
from data.sampling import Prompts, Sampling
from eagle31.errors import UserError

PROMPTS = [[1, 2, 3], [4], [5, 6], [7]]
SAMPLING = Sampling(max_new_tokens=9, stop_token_ids=(3, 2), temperature=0.5, seed=5)


class Echo:
    """Answers a prompt with itself, the last prompt first; refuses some; may end after a few."""

    def __init__(self, engine: str = "echo", refused: Sequence[int] = (), num_answers: int = 99) -> None:
        self.engine, self.refused, self.num_answers = engine, refused, num_answers
        self.asked: list[int] = []

    def write(
        self,
        prompts: Prompts,
        missing: Sequence[int],
        sampling: Sampling,
        done: Callable[[Mapping[int, list[int]]], None],
    ) -> dict[int, str]:
        for i in reversed(missing):
            if len(self.asked) == self.num_answers:
                raise InterruptedError
            self.asked.append(i)
            if i not in self.refused:
                done({i: list(prompts[i])})
        return dict.fromkeys(self.refused, "too long")


def answers(
    output: Path,
    writer: Echo | None = None,
    prompts: Prompts = PROMPTS,
    sampling: Sampling = SAMPLING,
    model: str = "f",
) -> list[list[int]]:
    return answer_prompts(writer or Echo(), prompts, sampling, output=output, model_fingerprint=model)


def test_answers_come_in_the_order_of_their_prompts(tmp_path: Path) -> None:
    assert answers(tmp_path / "a.jsonl") == PROMPTS
    header, *lines = map(json.loads, (tmp_path / "a.jsonl").read_text().splitlines())
    assert [line["index"] for line in lines] == [3, 2, 1, 0]
    assert (header["engine"], header["model"], header["seed"]) == ("echo", "f", 5)
    assert (header["temperature"], header["stop_token_ids"]) == (0.5, [2, 3])


def test_what_is_there_is_not_asked_for_again(tmp_path: Path) -> None:
    output, first, second, third = tmp_path / "a.jsonl", Echo(num_answers=2), Echo(), Echo()
    with pytest.raises(InterruptedError):
        answers(output, first)
    with output.open("a") as file:
        file.write('{"index": 1, "pro')
    assert answers(output, second) == PROMPTS
    assert (first.asked, second.asked) == ([3, 2], [1, 0])
    assert answers(output, third) == PROMPTS
    assert third.asked == []


def test_a_refused_prompt_is_told_and_asked_for_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert answers(tmp_path / "a.jsonl", Echo(refused=[1])) == [PROMPTS[0], [], *PROMPTS[2:]]
    assert "1 of 4 prompts are refused:\n  prompt 1: too long" in capsys.readouterr().err
    later = Echo()
    assert answers(tmp_path / "a.jsonl", later) == PROMPTS
    assert later.asked == [1]


@pytest.mark.parametrize(
    "change",
    [
        {"model": "g"},
        {"writer": Echo("another")},
        {"sampling": replace(SAMPLING, max_new_tokens=5)},
        {"sampling": replace(SAMPLING, temperature=1.0)},
        {"sampling": replace(SAMPLING, seed=1)},
    ],
)
def test_other_settings_are_refused(tmp_path: Path, change: dict) -> None:
    answers(tmp_path / "a.jsonl")
    with pytest.raises(UserError, match="Was written with another"):
        answers(tmp_path / "a.jsonl", **change)


def test_other_prompts_and_damage_are_refused(tmp_path: Path) -> None:
    output = tmp_path / "a.jsonl"
    answers(output)
    with pytest.raises(UserError, match="Answers another prompt"):
        answers(output, prompts=PROMPTS[::-1])
    with pytest.raises(UserError, match="Answers another prompt"):
        answers(output, prompts=PROMPTS[:2])
    lines = output.read_text().splitlines(keepends=True)
    output.write_text("".join([lines[0], "{oops\n", *lines[2:]]))
    with pytest.raises(UserError, match=r"a\.jsonl:2"):
        answers(output)


def test_dataset_masks_exactly_the_answer() -> None:
    dataset = answers_dataset([[1, 2, 3], [4]], [[5, 6], [7]], ["a", "b"])
    assert dataset[0] == {
        "id": "a",
        "input_ids": [1, 2, 3, 5, 6],
        "loss_mask": [False, False, False, True, True],
        "num_prompt_tokens": 3,
    }
    assert dataset[1]["loss_mask"] == [False, True]
    assert dataset.features["input_ids"].feature.dtype == "int32"
