"""Which conversations a run trains on and holds out."""

import json
from pathlib import Path
from typing import Any

import pytest

from data.conversations.held_out import first_prompt
from data.conversations.mixing import LEFT_OUT, MixedConversations, mix, remove_tables
from data.conversations.preformatted import not_split
from eagle31.errors import UserError
from tests.data.conversations.jsonl_files import write_jsonl
from tests.train.torchrun import composed
from train.config.compose import composed as composed_and_checked
from train.stages.sources import mixture_of, share_inputs, source_inputs


def rows(name: str, number: int) -> list[dict[str, Any]]:
    return [
        {"id": f"{name}{i}", "question": f"{name} {i}?", "answer": f"{name}{i} it is"} for i in range(number)
    ]


def read(directory: Path, *settings: str) -> MixedConversations:
    directory.mkdir(exist_ok=True)
    config = composed("any_target", "target.model=x", *settings)
    return mix(mixture_of(config, lambda source, _: source, not_split), directory, num_workers=1)


def inputs(tmp_path: Path, *settings: str) -> Any:
    config = composed("any_target", "target.model=x", *settings)
    return source_inputs(config, lambda source, _: source), share_inputs(config.data)


HELD_OUT = ("data.num_validation=3", "data.num_test=2")


@pytest.fixture
def sources(tmp_path: Path) -> tuple[str, ...]:
    first = write_jsonl(tmp_path / "a.jsonl", rows("a", 60))
    csv = tmp_path / "b.csv"
    csv.write_text("ask,reply\n" + "".join(f"b {i}?,b{i}\n" for i in range(30)))
    columns = "prompt_column:ask,response_column:reply"
    return (
        "data.train=null",
        f"data.sources={{one:{{source:{first}}},two:{{source:{csv},{columns}}}}}",
        *HELD_OUT,
    )


def test_several_sources_are_read_with_their_own_columns(tmp_path: Path, sources: tuple[str, ...]) -> None:
    found = read(tmp_path / "run", *sources)
    assert len(found.training) == 85
    assert len(found.held_out) == 5
    prompts = [first_prompt(one) for one in found.training]
    assert len(set(prompts)) == 85
    assert not {first_prompt(one) for one in found.held_out} & set(prompts)
    assert {prompt[0] for prompt in prompts} == {"a", "b"}
    used = found.summary["num_conversations_used"]
    assert sum(used.values()) == 85
    assert found.summary["num_conversations_read"] == 90
    assert "num_near_duplicates" not in found.summary
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [
        "conversations.jsonl",
        "training.npy",
    ]
    remove_tables(tmp_path / "run")
    assert not list((tmp_path / "run").iterdir())


def test_weights_and_limits_choose_after_prompts_are_held_out(
    tmp_path: Path, sources: tuple[str, ...]
) -> None:
    held_out = [one.id for one in read(tmp_path / "run", *sources).held_out]
    weights = (
        "data.sources.one.weight=1",
        "data.sources.two.weight=3",
        "data.sources.two.max_conversations=15",
    )
    found = read(tmp_path / "run", *sources, *weights)
    assert found.summary["num_conversations_used"] == {"one": 5, "two": 15}
    assert len(found.training) == 20
    assert [one.id for one in found.held_out] == held_out
    before, after = inputs(tmp_path, *sources), inputs(tmp_path, *sources, *weights)
    assert before[0] == after[0]  # held-out prompts are not answered again
    assert before[1] == {}
    assert after[1] == {"shares": {"one": [1.0, None], "two": [3.0, 15]}}


def test_near_duplicates_and_evaluation_prompts_are_left_out_counted_and_named(tmp_path: Path) -> None:
    long = "one two three four five six seven eight nine ten eleven twelve"
    train = rows("a", 60)
    train[10]["question"] = f"{long} thirteen fourteen fifteen sixteen"
    train[11] |= {"question": f"{long} THIRTEEN fourteen, fifteen sixteen", "answer": "a10 it is"}
    train[12]["question"] = " From  THE matrix"
    train[13]["question"] = "from another set"
    train[14]["question"] = "Held out by  data.eval"
    files = {
        "matrix": write_jsonl(tmp_path / "m.jsonl", [{"prompt": "from the matrix"}]),
        "other": write_jsonl(tmp_path / "o.jsonl", [{"q": "From another set"}]),
        "eval": write_jsonl(
            tmp_path / "e.jsonl",
            [{"question": f"{i}"} for i in range(9)] + [{"question": "held out by data.eval"}],
        ),
    }
    settings = (
        f"data.train={write_jsonl(tmp_path / 'a.jsonl', train)}",
        f"data.eval={files['eval']}",
        *HELD_OUT,
    )
    off = read(tmp_path / "off", *settings)
    assert len(off.training) == 59
    sets = tmp_path / "sets.yaml"
    sets.write_text(
        f"other: {{source: {files['other']}, prompt_column: q}}\ngsm: {{source: {files['matrix']}}}\n"
    )
    on = ("data.near_duplicates=0.7", f"data.evaluation_sets={sets}")
    found = read(tmp_path / "on", *settings, *on)
    assert found.summary["num_near_duplicates"] == 1
    assert found.summary["num_with_evaluation_prompts"] == {
        "data.eval": 1,
        "other": 1,
        "gsm": 1,
    }
    kept = {one.id for one in found.training}
    assert kept == {f"a{i}" for i in range(60)} - {"a11", "a12", "a13", "a14"}
    lines = [json.loads(line) for line in (tmp_path / "on" / LEFT_OUT).read_text().splitlines()]
    assert lines == [
        {"id": "a11", "source": "data.train", "near_duplicate_of": "a10"},
        {"id": "a12", "source": "data.train", "evaluation_set": "gsm"},
        {"id": "a13", "source": "data.train", "evaluation_set": "other"},
        {"id": "a14", "source": "data.train", "evaluation_set": "data.eval"},
    ]
    # Off, they leave no trace in what the data depends on.
    assert inputs(tmp_path, *settings)[0].keys() == {"sources", "regenerated"}
    assert isinstance(inputs(tmp_path, *settings, "data.regenerate.enabled=false")[0], str)
    traces = inputs(tmp_path, *settings, *on)[0]
    assert traces["near_duplicates"] == 0.7
    assert len(traces["evaluation_sets"]) == 2


def test_a_held_out_prompt_in_other_white_space_is_not_trained_on(tmp_path: Path) -> None:
    train = rows("a", 30)
    train += [row | {"id": f"again-{row['id']}", "question": row["question"].upper()} for row in train]
    settings = (f"data.train={write_jsonl(tmp_path / 'a.jsonl', train)}", *HELD_OUT)
    found = read(tmp_path / "on", *settings)
    held_out = {first_prompt(one).lower() for one in found.held_out}
    assert not held_out & {first_prompt(one).lower() for one in found.training}
    assert len(found.training) == 60 - 2 * len(held_out)


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        (("data.train=null",), "data.train"),
        (("data.train=a.jsonl", "data.sources={x:{source:b}}"), "data.train"),
        (("data.train=null", "data.sources={x:{}}"), "data.sources.x.source"),
        (("data.train=null", "data.sources={x:{source:a,weight:1},y:{source:b}}"), "data.sources.y.weight"),
    ],
)
def test_sources_that_cannot_be_used_are_refused(settings: tuple[str, ...], field: str) -> None:
    with pytest.raises(UserError) as caught:
        composed_and_checked(["recipe=any_target", "target.model=x", *settings])
    assert caught.value.field == field


def test_an_unreadable_source_is_named_by_its_key(tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "a.jsonl", [{"x": "q", "y": "a"}])
    with pytest.raises(UserError, match=r"data\.sources\.x\.prompt_column") as caught:
        read(tmp_path / "run", "data.train=null", f"data.sources={{x:{{source:{file}}}}}")
    assert caught.value.field == "data.sources.x.source"
