"""Chat templates that cannot be used, and what does not fit the target, in scripts/inspect_data and a run."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from data.embedded.target import EmbeddedTarget
from tests.bad_input.commands import Case, each
from tests.data.conversations.jsonl_files import write_jsonl
from tests.train.small_run import RECIPE, arguments

ALL = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
PROMPT_OF_ANOTHER_ROLE = "{% if add_generation_prompt %}<|im_start|>bot\n{% endif %}"
TEMPLATE = "target.chat_template=t.jinja"


@pytest.fixture(autouse=True)
def files(small_target: EmbeddedTarget, tmp_path: Path) -> None:
    """A target and forty conversations, under the names that the cases have for them."""
    (tmp_path / "target").symlink_to(small_target.model, target_is_directory=True)
    messages = [
        [{"role": "user", "content": f"{i}"}, {"role": "assistant", "content": "it"}] for i in range(40)
    ]
    write_jsonl(tmp_path / "train.jsonl", [{"messages": one} for one in messages])


def template(source: str) -> Callable[[Path], None]:
    return lambda directory: (directory / "t.jinja").write_text(source) and None


def inspected(name: str, source: str, *says: str) -> Case:
    """Return the case of a template in scripts/inspect_data."""
    given = ("train.jsonl", "--tokenizer", "target", "--chat-template", "t.jinja")
    return Case(name, given, ("error: --chat-template=", *says), template(source), "scripts/inspect_data")


@each(
    [
        inspected("raises", "{{ raise_exception('no system prompt') }}", "no system prompt"),
        inspected("reads_internals", "{{ ''.__class__.__mro__ }}", "is unsafe"),
        inspected("prompts_another_role", ALL + PROMPT_OF_ANOTHER_ROLE, "--regenerate"),
    ]
)
def test_a_template_that_cannot_be_used_is_named(case: Case, tmp_path: Path) -> None:
    case.check(tmp_path)


def without(name: str, **tokenizer_config: str) -> Callable[[Path], None]:
    """Return what makes a copy of the target that lacks a file, and changes its tokenizer_config.json."""

    def prepare(directory: Path) -> None:
        target = directory / "target"
        source = target.resolve()
        target.unlink()
        shutil.copytree(source, target)
        (target / name).unlink()
        if tokenizer_config:
            (target / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))

    return prepare


RUNS = [
    Case(
        "no_answers",
        (TEMPLATE,),
        ("error: target.chat_template=t.jinja", "does the template write"),
        template("hello"),
    ),
    Case(
        "no_template",
        (),
        ("error: target.chat_template=null", "no chat template"),
        without("chat_template.jinja"),
    ),
    Case(
        "empty_tokenizer",
        (),
        ("error: target.model=target: ", "no vocabulary"),
        without("tokenizer.json", tokenizer_class="LlamaTokenizer", chat_template=ALL),
    ),
    Case(
        "no_user_turn",
        ("data.train=self", "data.regenerate.enabled=true", TEMPLATE),
        ("error: data.train=self: ", "no special token at the end"),
        template("{% for m in messages %}{{ m.role }}\n{{ m.content }}\n{% endfor %}"),
    ),
    Case(
        "aux_layer_beyond_the_end", ("drafter.aux_layer_ids=[1,2,5]",), ("drafter.aux_layer_ids=[1, 2, 5]: ",)
    ),
    Case(
        "positions_below_the_samples",
        ("drafter.max_position_embeddings=8",),
        ("drafter.max_position_embeddings=8: ", "data.max_tokens=256"),
    ),
    Case(
        "rows_too_short",
        ("train.row_tokens=40", "data.max_tokens=40"),
        ("error: train.row_tokens=40: ", "held-out"),
    ),
    Case(
        "argument_of_ours",
        ("data.template_kwargs.add_generation_prompt=true",),
        ("data.template_kwargs.add_generation_prompt=true: ",),
    ),
]


@each(RUNS)
def test_a_run_names_what_does_not_fit_before_it_reads_the_data(case: Case, tmp_path: Path) -> None:
    given = EmbeddedTarget(Path("target"), Path("train.jsonl"), Path("none"))
    case.check(tmp_path, f"recipe={RECIPE}", *arguments(given, Path("run")), "stages=[data]")
    assert not list(tmp_path.glob("run/artifacts/data-*/train"))
