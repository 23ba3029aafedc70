"""The readers of conversations and the masks of templates: any content gives a result or a UserError."""

import io
import json
import string
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from data.conversations import template
from data.conversations.choices import Turns
from data.conversations.inspection import bracketed, pieces
from data.conversations.masks import render
from data.conversations.reading import ReadResult, read_conversations, source_fingerprint
from data.conversations.schemas import Conversation
from data.conversations.split import prompt_hashes, prompt_rank
from data.conversations.table import write_table
from data.conversations.template import template_fingerprint
from eagle31.errors import UserError
from tests.data.conversations import chat_templates
from tests.data.conversations.chat_templates import byte_level_tokenizer


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("reading")


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return byte_level_tokenizer(chat_templates.CHATML)


@pytest.fixture(autouse=True)
def examples(request: pytest.FixtureRequest) -> None:
    """Chosen by the seed of each test, so that a run repeats another; many more with --full."""
    many = request.config.getoption("--full")
    settings.register_profile(
        "eagle31",
        max_examples=2000 if many else 60,
        derandomize=not many,
        database=None,
        deadline=5000,  # milliseconds of one example
        phases=(Phase.explicit, Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    settings.load_profile("eagle31")


def read(path: Path, content: bytes, **chosen: Any) -> ReadResult | None:
    """Return what is read of a file, of which any part may be malformed; None if it is refused."""
    path.write_bytes(content)
    source_fingerprint(str(path))
    try:
        result = read_conversations(str(path), max_malformed_fraction=1.0, **chosen)
    except UserError as error:
        refused = error
    else:
        refused = None
    if refused is not None:
        assert refused.remedy
        assert len(str(refused)) < 10_000
        return None
    # What is read can be stored, hashed and split.
    table = write_table(result.conversations, path.with_suffix(".arrow"))
    assert [one.id for one in table] == [one.id for one in result.conversations]
    assert len(prompt_hashes(result.conversations)) == len(result.conversations)
    return result


texts = st.text(alphabet=st.characters(codec=None, exclude_categories=()), max_size=20)  # surrogates too
plain = st.text(max_size=20)
roles = st.sampled_from(["system", "user", "assistant", "tool", "developer", "human", "gpt", "robot", ""])
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)
contents = st.one_of(texts, st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": texts})), values)
turns = st.fixed_dictionaries(
    {},
    optional={
        "role": roles | values,
        "from": roles,
        "content": contents,
        "value": texts,
        "tool_calls": values,
    },
)
columns = st.sampled_from(["messages", "conversations", "prompt", "response", "turns", "id", "tools", "text"])
objects = st.one_of(
    st.dictionaries(columns, values | st.lists(turns, max_size=4), max_size=4),
    st.fixed_dictionaries(
        {"messages": st.lists(turns, max_size=4)}, optional={"id": values, "tools": values}
    ),
    st.fixed_dictionaries({"prompt": texts, "response": texts}),
)


@given(
    content=st.binary(max_size=400), suffix=st.sampled_from([".jsonl", ".json", ".csv", ".tsv", ".parquet"])
)
def test_any_bytes(content: bytes, suffix: str, directory: Path) -> None:
    read(directory / f"bytes{suffix}", content)


@given(rows=st.lists(objects, max_size=4), is_array=st.booleans(), answers=st.booleans())
def test_any_rows_of_json(rows: list[Any], is_array: bool, answers: bool, directory: Path) -> None:
    text = json.dumps(rows) if is_array else "\n".join(map(json.dumps, rows))
    read(directory / "rows.jsonl", text.encode(), require_answer=answers)


@given(rows=st.lists(objects, min_size=1, max_size=3), data=st.data())
def test_json_that_is_damaged(rows: list[Any], data: st.DataObject, directory: Path) -> None:
    content = bytearray("\n".join(map(json.dumps, rows)).encode())
    assume(content)
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    read(directory / "damaged.jsonl", bytes(content))
    read(directory / "damaged.json", b"[" + bytes(content) + b"]")


@given(lines=st.lists(st.text(alphabet=string.printable + "é\0\u2028", max_size=30), max_size=5))
def test_any_lines_of_csv(lines: list[str], directory: Path) -> None:
    content = "\n".join(["prompt,response", *lines]).encode()
    found = read(directory / "lines.csv", content)
    if found is not None:
        assert all(len(one.messages) == 2 for one in found.conversations)


@given(rows=st.lists(st.tuples(plain, plain), min_size=1, max_size=5), data=st.data())
def test_parquet_that_is_damaged(rows: list[tuple[str, str]], data: st.DataObject, directory: Path) -> None:
    prompts, responses = zip(*rows, strict=True)
    sink = io.BytesIO()
    table = pyarrow.table({"prompt": list(prompts), "response": list(responses)})
    pyarrow.parquet.write_table(table, sink, compression="none")
    content = bytearray(sink.getvalue())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    read(directory / "damaged.parquet", bytes(content[: data.draw(st.integers(0, len(content)))]))
    read(directory / "damaged.parquet", bytes(content))


dialogues = st.lists(st.tuples(plain.filter(str.strip), plain.filter(str.strip)), min_size=1, max_size=4)
TEMPLATES = [chat_templates.CHATML, chat_templates.THINKING]


@given(dialogue=dialogues, chosen=st.sampled_from(list(Turns)))
def test_a_mask_covers_the_answers(
    dialogue: list[tuple[str, str]], chosen: Turns, tokenizer: PreTrainedTokenizerBase
) -> None:
    messages = [
        message
        for question, answer in dialogue
        for message in ({"role": "user", "content": question}, {"role": "assistant", "content": answer})
    ]
    conversation = Conversation("a", tuple(messages))
    eos = {tokenizer.convert_tokens_to_ids("<|im_end|>")}
    samples = render(tokenizer, conversation, turns=chosen, template_kwargs={}, eos_token_ids=eos)
    assert len(samples) == (len(dialogue) if chosen is Turns.each else 1)
    for sample in samples:
        assert len(sample.input_ids) == len(sample.loss_mask)
        assert any(sample.loss_mask)
        assert bracketed(pieces(tokenizer, sample)).count("[[") >= 1


PARTS = [
    "{%",
    "%}",
    "{{",
    "}}",
    "for m in messages",
    "endfor",
    "m.content",
    "m['role']",
    "if",
    "endif",
    "else",
]
PARTS += [
    "add_generation_prompt",
    "range(99999)",
    "set a = 1",
    "a",
    "+",
    "*",
    "'x'",
    "[0]",
    "| trim",
    "-",
    "\n",
    "1",
]


@given(source=st.lists(st.sampled_from(PARTS) | st.text(max_size=3), max_size=14).map(" ".join))
def test_any_template(source: str, tokenizer: PreTrainedTokenizerBase) -> None:
    assume(source.strip())
    conversation = Conversation(
        "a", ({"role": "user", "content": "what"}, {"role": "assistant", "content": "four"})
    )
    before, limit = tokenizer.chat_template, template.RENDER_SECONDS
    tokenizer.chat_template, template.RENDER_SECONDS = source, 1.0
    try:
        template_fingerprint(tokenizer, {})
        render(tokenizer, conversation, turns=Turns.all, template_kwargs={}, eos_token_ids={0})
    except UserError:
        pass
    finally:
        tokenizer.chat_template, template.RENDER_SECONDS = before, limit


@given(prompt=plain, seed=st.integers(0, 2**63 - 1))
def test_any_prompt_has_a_rank(prompt: str, seed: int) -> None:
    assert len(prompt_rank(prompt, seed)) == 32
