"""The tables of formats in docs/data.md, of which the data stage reads each row."""

import json
import re
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from data.conversations.reading import Source
from data.embedded.target import EmbeddedTarget
from eagle31.errors import UserError
from tests.data.conversations.jsonl_files import write_jsonl
from tests.train.small_run import RECIPE, arguments
from tests.train.stages.making import run_stage_alone
from train.config.compose import CHECKOUT
from train.config.run import Stage
from train.stages.states import training_samples

TEMPLATE = """\
{%- for message in messages -%}
{{ message.role + ':\\n' + message.content }}
{%- for call in message.tool_calls or [] -%}
{{ call.function.name + call.function.arguments | tojson }}
{%- endfor -%}
{{ eos_token + '\\n' }}
{%- endfor -%}
{%- if add_generation_prompt %}{{ 'assistant:\\n' }}{% endif -%}"""
REFUSED = "refused: "


def documented(heading: str) -> list[tuple[str, str]]:
    """Return the rows of a table of docs/data.md: JSON, and what becomes of it."""
    [table] = re.findall(
        rf"^\| row \| {heading} \|\n\|.*\n((?:\|.*\n)+)",
        (CHECKOUT / "docs/data.md").read_text(),
        re.MULTILINE,
    )
    found = re.findall(r"^\| `(.+?)` \| (.+) \|$", table, re.MULTILINE)
    assert len(found) == table.count("\n") > 4
    return [(row, outcome.strip("`")) for row, outcome in found]


def shown(tokenizer, sample: dict) -> str:
    """Return the sample's text with what is supervised in brackets, without line breaks and ends of turns."""
    text, inside = "", False
    for id, supervised in zip(sample["input_ids"], sample["loss_mask"], strict=True):
        text += "" if supervised == inside else "[[" if supervised else "]]"
        text += tokenizer.decode([id])
        inside = supervised
    text += "]]" if inside else ""
    return " ".join(text.replace(tokenizer.eos_token, "").split())


@pytest.mark.parametrize("heading", ["what becomes of it", "first prompt"])
def test_the_table_says_what_the_data_stage_makes_of_each_format(
    small_target: EmbeddedTarget, tmp_path: Path, heading: str
) -> None:
    regenerate = heading == "first prompt"
    formats = documented(heading)
    expected, sources = {}, []
    for i, (row, outcome) in enumerate(formats):
        name, file = f"format{i}", tmp_path / f"{i}.jsonl"
        write_jsonl(file, [json.loads(row) | {"id": name}])
        if outcome.startswith(REFUSED):
            with pytest.raises(UserError):
                list(Source(str(file)).reader())
        else:
            expected[name] = outcome
            sources.append(f"{name}:{{source:{file}}}")
    (tmp_path / "template.jinja").write_text(TEMPLATE)
    settings = [
        "data.train=null",
        f"data.sources={{{','.join(sources)}}}",
        f"data.eval={small_target.train}",
        f"target.chat_template={tmp_path / 'template.jinja'}",
        f"data.regenerate.enabled={str(regenerate).lower()}",
        "data.regenerate.max_new_tokens=2",
    ]
    given = [*arguments(small_target, tmp_path / "run"), *settings]
    context = run_stage_alone(Stage.data, RECIPE, *given)
    tokenizer = AutoTokenizer.from_pretrained(small_target.model)
    found = {}
    for sample in training_samples(context.artifacts[Stage.data]).to_list():
        name = sample["id"].partition("/")[0]
        text = shown(tokenizer, sample)
        found.setdefault(name, text.partition(" assistant: [[")[0] if regenerate else text)
    assert found == expected
