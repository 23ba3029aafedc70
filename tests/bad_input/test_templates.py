"""Chat templates that cannot be used, and what does not fit the target, in scripts/inspect_data and a run."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

from data.embedded.target import EmbeddedTarget
from tests.bad_input.commands import Case, CheckCase, each, link
from tests.train.small_run import RECIPE, arguments

INSPECT = "scripts/inspect_data"
TURN = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
ALL = f"{{% for m in messages %}}{TURN}{{% endfor %}}"
PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
FORTY = [
    {
        "messages": [
            {"role": "user", "content": f"what is {i}"},
            {"role": "assistant", "content": f"it is {i}"},
        ]
    }
    for i in range(40)
]


def written(source: str | bytes) -> Callable[[Path], None]:
    def prepare(directory: Path) -> None:
        data = source.encode() if isinstance(source, str) else source
        (directory / "t.jinja").write_bytes(data)

    return prepare


def inspected(name: str, source: str | bytes, *says: str) -> Case:
    """Return the case of a template in scripts/inspect_data."""
    given = ("train.jsonl", "--tokenizer", "target", "--chat-template", "t.jinja")
    return Case(name, given, ("error: --chat-template=", *says), written(source), INSPECT)


TEMPLATES = [
    inspected("raises", "{{ raise_exception('no system prompt') }}", "no system prompt"),
    inspected("reads_internals", "{{ ''.__class__.__mro__ }}", "is unsafe"),
    inspected("prompts_another_role", ALL + PROMPT.replace("assistant", "bot"), "--regenerate"),
]


@each(TEMPLATES)
def test_a_template_that_cannot_be_used_is_named(
    case: Case, check_case: CheckCase, small_target: EmbeddedTarget, tmp_path: Path
) -> None:
    link(tmp_path / "target", small_target.model)
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, FORTY)))
    check_case(case)


def own_target(directory: Path) -> None:
    target = directory / "target"
    source = target.resolve()
    target.unlink()
    shutil.copytree(source, target)


def without(*names: str, tokenizer_class: str | None = None) -> Callable[[Path], None]:
    def prepare(directory: Path) -> None:
        own_target(directory)
        for name in names:
            (directory / "target" / name).unlink()
        if tokenizer_class is not None:
            config = {"tokenizer_class": tokenizer_class, "chat_template": ALL}
            (directory / "target" / "tokenizer_config.json").write_text(json.dumps(config))

    return prepare


def run(
    name: str, says: tuple[str, ...], *overrides: str, prepare: Callable[[Path], None] = lambda _: None
) -> Case:
    """Return the case of the data stage of a small run, with settings that replace its own."""
    return Case(name, overrides, says, prepare)


def template_run(name: str, source: str, *says: str) -> Case:
    return run(name, says, "target.chat_template=t.jinja", prepare=written(source))


RUNS = [
    template_run("no_answers", "hello", "error: target.chat_template=t.jinja", "does the template write"),
    run(
        "no_template",
        ("error: target.chat_template=None", "no chat template"),
        prepare=without("chat_template.jinja"),
    ),
    run(
        "empty_tokenizer",
        ("error: target.model=target: ", "no vocabulary"),
        prepare=without("tokenizer.json", tokenizer_class="LlamaTokenizer"),
    ),
    run(
        "no_user_turn",
        ("error: data.train=self: ", "no special token at the end"),
        "data.train=self",
        "data.regenerate.enabled=true",
        "target.chat_template=t.jinja",
        prepare=written("{% for m in messages %}{{ m.role }}\n{{ m.content }}\n{% endfor %}"),
    ),
    run("aux_layer_beyond_the_end", ("drafter.aux_layer_ids=[1, 2, 5]: ",), "drafter.aux_layer_ids=[1,2,5]"),
    run(
        "positions_below_the_samples",
        ("drafter.max_position_embeddings=8: ", "data.max_tokens=256"),
        "drafter.max_position_embeddings=8",
    ),
    run(
        "rows_too_short",
        ("error: train.row_tokens=40: ", "held-out"),
        "train.row_tokens=40",
        "data.max_tokens=40",
    ),
    run(
        "argument_of_ours",
        ("data.template_kwargs.add_generation_prompt=True: ",),
        "data.template_kwargs.add_generation_prompt=true",
    ),
]


@each(RUNS)
def test_a_run_names_what_does_not_fit_before_it_reads_the_data(
    case: Case, check_case: CheckCase, small_target: EmbeddedTarget, tmp_path: Path
) -> None:
    link(tmp_path / "target", small_target.model)
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, FORTY)))
    given = EmbeddedTarget(Path("target"), Path("train.jsonl"), Path("none"))
    settings = [*arguments(given, Path("run")), "stages=[data]"]
    check_case(Case(case.name, (f"recipe={RECIPE}", *settings, *case.arguments), case.says, case.prepare))
    assert not list(tmp_path.glob("run/artifacts/data-*/train"))
