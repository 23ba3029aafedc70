"""The cells of a matrix, their names, and which prompts they have."""

from pathlib import Path

import numpy as np
import pytest

from data.text.perturbation import UNCHANGED, PromptSetting
from data.text.schemas import Conversation
from data.text.split import prompt_hashes
from eagle31.errors import UserError
from tests.data.text.jsonl_files import write_jsonl
from train.evaluation.cells import (
    EVALUATION,
    Cell,
    LeftOut,
    RenderedCell,
    rendered_cell,
    settings_of,
)
from train.evaluation.domains import DomainSource, chosen_domain, prompt_messages, read_domains

USER, ASSISTANT = "user", "assistant"


def conversation(*texts: str, roles: tuple[str, ...] = (USER, ASSISTANT)) -> Conversation:
    messages = [{"role": roles[index % len(roles)], "content": text} for index, text in enumerate(texts)]
    return Conversation("id", tuple(messages))


def names(templates: list[str], systems: list[str], lengths: list[int], crossed: bool = False) -> list[str]:
    return [Cell("d", one).name for one in settings_of(templates, systems, lengths, crossed=crossed)]


def test_a_cell_differs_in_one_thing_from_the_base_cell_unless_all_are_crossed() -> None:
    factors = ["renamed_roles", "plain"], ["short"], [2048]
    assert names(*factors) == ["d", "d/renamed_roles", "d/plain", "d/system_short", "d/context_2048"]
    crossed = names(*factors, crossed=True)
    assert len(crossed) == len(set(crossed)) == 3 * 2 * 2
    assert {*names(*factors), "d/plain+system_short+context_2048"} <= set(crossed)
    assert names([UNCHANGED], [UNCHANGED], []) == ["d"]
    assert names(["a/mine.jinja"], [], []) == ["d", "d/mine"]
    with pytest.raises(UserError, match="have this name"):
        settings_of(["a/mine.jinja", "b/mine.jinja"], [], [], crossed=False)


def test_prompts_that_are_refused_or_have_no_room_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    def render(one: Conversation, _: PromptSetting) -> list[int]:
        text = one.messages[0]["content"]
        if text == "refused":
            raise UserError("template", "x", "It is refused.")
        return [0] * len(text)

    texts = ["kept", "much too long", "refused"]
    cell = Cell("d", PromptSetting(system="short"))
    found = rendered_cell(cell, EVALUATION, [conversation(text) for text in texts], render, 5)
    assert isinstance(found, RenderedCell)
    assert found.prompts == [[0] * 4]
    assert "d/system_short: 2 prompts are left out, the first: 13 tokens" in capsys.readouterr().out
    nothing = rendered_cell(cell, EVALUATION, [conversation("refused")], render, 5)
    assert nothing == LeftOut("d/system_short", "It is refused.")
    none = rendered_cell(cell, EVALUATION, [], render, 5)
    assert isinstance(none, LeftOut)
    short = Cell("d", PromptSetting(context_tokens=5))
    found = rendered_cell(short, EVALUATION, [conversation("four"), conversation("fives")], render, 5)
    assert isinstance(found, RenderedCell)
    assert found.prompts == [[0] * 5]


def test_a_prompt_ends_before_the_turn_that_the_target_writes() -> None:
    contents = [
        [message["content"] for message in prompt_messages(one)]
        for one in (
            conversation("a", "b"),
            conversation("a", "b", "c", "d"),
            conversation("a", "b", roles=(USER,)),  # MT-Bench: the second turn refers to an answer
        )
    ]
    assert contents == [["a"], ["a", "b", "c"], ["a"]]


def test_categories_are_domains(tmp_path: Path) -> None:
    rows = [{"turns": [f"question {n}", "then"], "kind": ("maths", "long form")[n % 2]} for n in range(8)]
    write_jsonl(tmp_path / "a.jsonl", rows)
    shared = {"split": "test", "subset": None, "prompt_column": None, "num_prompts": 2, "field": "--data"}
    found = read_domains("mt", str(tmp_path / "a.jsonl"), category_column="kind", **shared)  # type: ignore[arg-type]
    assert [(one.name, len(one.conversations), len(one.documents)) for one in found] == [
        ("mt.maths", 4, 8),
        ("mt.long_form", 4, 8),
    ]
    with pytest.raises(UserError, match="There is no column category"):
        read_domains("mt", str(tmp_path / "a.jsonl"), category_column="category", **shared)  # type: ignore[arg-type]


def test_prompts_of_training_are_left_out_and_validation_has_others() -> None:
    conversations = [conversation(f"question {n}", "answer") for n in range(10)]
    source = DomainSource("d", 4, conversations, [])
    seen = prompt_hashes([conversation("question  3 ")])  # white space does not make another prompt
    domain = chosen_domain(source, seen, seed=0)
    assert domain.num_left_out == 1
    evaluation, validation = (
        {one.messages[0]["content"] for one in part} for part in (domain.evaluation, domain.validation)
    )
    assert len(evaluation) == len(validation) == 4
    assert not evaluation & validation
    assert "question 3" not in evaluation | validation
    everything = prompt_hashes(conversations)
    assert not chosen_domain(source, everything, seed=0).evaluation
    assert np.unique(everything).size == 10
