"""The file of answers with any generator."""

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
    """A generator that answers each prompt with itself, the last prompt first.

    Args:
        refused: indices of prompts that get no answer.
        num_answers: is interrupted after so many answers.
    """

    def __init__(self, engine: str = "echo", refused: Sequence[int] = (), num_answers: int = 99) -> None:
        self.engine, self.refused, self.num_answers = engine, refused, num_answers
        self.answered: list[int] = []

    def generate(
        self,
        prompts: Prompts,
        indices: Sequence[int],
        sampling: Sampling,
        on_answers: Callable[[Mapping[int, list[int]]], None],
    ) -> dict[int, str]:
        for i in reversed(indices):
            if len(self.answered) == self.num_answers:
                raise InterruptedError
            self.answered.append(i)
            if i not in self.refused:
                on_answers({i: list(prompts[i])})
        return dict.fromkeys(self.refused, "too long")


def answers(
    output: Path,
    generator: Echo | None = None,
    prompts: Prompts = PROMPTS,
    sampling: Sampling = SAMPLING,
    model: str = "f",
) -> list[list[int]]:
    return answer_prompts(generator or Echo(), prompts, sampling, output=output, model_fingerprint=model)


def test_answers_come_in_the_order_of_their_prompts(tmp_path: Path) -> None:
    assert answers(tmp_path / "a.jsonl") == PROMPTS
    header, *lines = map(json.loads, (tmp_path / "a.jsonl").read_text().splitlines())
    assert [line["index"] for line in lines] == [3, 2, 1, 0]
    assert (header["engine"], header["model"], header["seed"]) == ("echo", "f", 5)
    assert (header["temperature"], header["stop_token_ids"]) == (0.5, [2, 3])
    assert not {"top_p", "top_k"} & header.keys()  # as in files that earlier versions wrote


def test_existing_answers_are_not_generated_again(tmp_path: Path) -> None:
    output, first, second, third = tmp_path / "a.jsonl", Echo(num_answers=2), Echo(), Echo()
    with pytest.raises(InterruptedError):
        answers(output, first)
    with output.open("a") as file:
        file.write('{"index": 1, "pro')
    assert answers(output, second) == PROMPTS
    assert (first.answered, second.answered) == ([3, 2], [1, 0])
    assert answers(output, third) == PROMPTS
    assert third.answered == []


def test_a_refused_prompt_is_reported_and_tried_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert answers(tmp_path / "a.jsonl", Echo(refused=[1])) == [PROMPTS[0], [], *PROMPTS[2:]]
    assert "1 of 4 prompts were refused:\n  prompt 1: too long" in capsys.readouterr().err
    later = Echo()
    assert answers(tmp_path / "a.jsonl", later) == PROMPTS
    assert later.answered == [1]


@pytest.mark.parametrize(
    "change",
    [
        {"model": "g"},
        {"generator": Echo("another")},
        {"sampling": replace(SAMPLING, max_new_tokens=5)},
        {"sampling": replace(SAMPLING, temperature=1.0)},
        {"sampling": replace(SAMPLING, seed=1)},
        {"sampling": replace(SAMPLING, top_p=0.9)},
        {"sampling": replace(SAMPLING, top_k=3)},
    ],
)
def test_a_file_with_other_settings_is_a_user_error(tmp_path: Path, change: dict) -> None:
    answers(tmp_path / "a.jsonl")
    with pytest.raises(UserError, match="It was written with another"):
        answers(tmp_path / "a.jsonl", **change)


def test_a_file_for_other_prompts_or_a_damaged_one_is_a_user_error(tmp_path: Path) -> None:
    output = tmp_path / "a.jsonl"
    answers(output)
    with pytest.raises(UserError, match="for a prompt that the data does not have"):
        answers(output, prompts=PROMPTS[::-1])
    with pytest.raises(UserError, match="for a prompt that the data does not have"):
        answers(output, prompts=PROMPTS[:2])
    lines = output.read_text().splitlines(keepends=True)
    output.write_text("".join([lines[0], "{oops\n", *lines[2:]]))
    with pytest.raises(UserError, match=r"a\.jsonl:2"):
        answers(output)
    record = json.loads(lines[2])
    output.write_text("".join([*lines[:2], json.dumps(record | {"ids": [*record["ids"], 5]}) + "\n"]))
    with pytest.raises(UserError, match=r"a\.jsonl:3.*\n?.*damaged; delete this line and those below it"):
        answers(output)


def test_the_mask_covers_exactly_the_answer() -> None:
    dataset = answers_dataset([[1, 2, 3], [4]], [[5, 6], [7]], ["a", "b"])
    assert dataset[0] == {
        "id": "a",
        "input_ids": [1, 2, 3, 5, 6],
        "loss_mask": [False, False, False, True, True],
        "num_prompt_tokens": 3,
    }
    assert dataset[1]["loss_mask"] == [False, True]
    assert dataset.features["input_ids"].feature.dtype == "int32"
