"""The file of answers with any generator."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from data.generation.answers import answer_prompts
from data.sampling import Sampling
from eagle31.errors import UserError
from eagle31.json_files import read_jsonl
from tests.data.generation.generators import OneAtATime

PROMPTS = [[1, 2, 3], [4], [5, 6], [7]]
SAMPLING = Sampling(max_new_tokens=9, stop_token_ids=(3, 2), temperature=0.5, seed=5)


def answers(output: Path, generator: OneAtATime | None = None, **changes: Any) -> list[list[int]]:
    given = {"prompts": PROMPTS, "sampling": SAMPLING, "model_fingerprint": "f"} | changes
    return answer_prompts(generator or OneAtATime(list), output=output, **given)


def test_an_interrupted_run_resumes_and_repeats_nothing(tmp_path: Path) -> None:
    output, first, second, third = tmp_path / "a.jsonl", *(OneAtATime(list) for _ in range(3))
    first.fails_after = 2
    with pytest.raises(InterruptedError):
        answers(output, first)
    with output.open("a") as file:
        file.write('{"answers": [[1, [')  # as a killed process leaves it
    assert answers(output, second) == PROMPTS
    assert sorted(first.order + second.order) == [0, 1, 2, 3]
    header = read_jsonl(output)[0]
    assert (header["engine"], header["model"], header["stop_token_ids"]) == ("one", "f", [2, 3])
    assert answers(output, third) == PROMPTS
    assert third.order == []


def test_a_refused_prompt_is_reported_and_tried_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    longest = OneAtATime(list, refuses=[0])  # the longest comes first
    assert answers(tmp_path / "a.jsonl", longest) == [[], *PROMPTS[1:]]
    assert "1 of 4 were refused:\n  prompt 0: too long" in capsys.readouterr().err
    later = OneAtATime(list)
    assert answers(tmp_path / "a.jsonl", later) == PROMPTS
    assert later.order == [0]


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("model", {"model_fingerprint": "g"}),
        ("engine", {"generator": OneAtATime(list, "another")}),
        ("temperature", {"sampling": replace(SAMPLING, temperature=1.0)}),
    ],
)
def test_a_file_of_other_answers_is_a_user_error(tmp_path: Path, name: str, change: dict) -> None:
    answers(tmp_path / "a.jsonl")
    with pytest.raises(UserError, match=f"another {name};"):
        answers(tmp_path / "a.jsonl", **change)


def test_answers_to_other_prompts_are_a_user_error(tmp_path: Path) -> None:
    answers(tmp_path / "a.jsonl")
    for changed in ([[1, 2, 3], [4], [5, 8], [7]], [[1, 2, 3], [4], [5, 6, 6], [7]]):
        with pytest.raises(UserError, match=r"a\.jsonl: .*prompt 2 belong to other prompts"):
            answers(tmp_path / "a.jsonl", prompts=changed)


@pytest.mark.parametrize("number", [1, 3])
def test_a_damaged_line_is_named(tmp_path: Path, number: int) -> None:
    output = tmp_path / "a.jsonl"
    answers(output)
    lines = output.read_bytes().splitlines(keepends=True)
    changed = lines[number - 1].replace(b"5", b"4") if number == 1 else lines[number - 1].replace(b"[", b"{")
    assert changed != lines[number - 1]
    output.write_bytes(b"".join([*lines[: number - 1], changed, *lines[number:]]))
    with pytest.raises(UserError, match=rf"a\.jsonl:{number}=.*damaged"):
        answers(output)
