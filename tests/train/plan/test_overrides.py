"""Configurations as arguments of a recipe."""

import re
from typing import Any

import pytest

from tests.train.torchrun import composed
from train.config.run import RunConfig
from train.plan.commands import assigned, overrides_of


@pytest.mark.parametrize(
    "settings",
    [
        (),
        ("data.train='a b,c.jsonl'", "drafter.aux_layer_ids=[1,2,3]", "target.revision='123'"),
        ("data.template_kwargs={thinking: true, effort: 'high'}", "vllm.engine_args.dtype=half"),
        ("plan.num_nodes=3", "train.max_steps=5", "optim.lr=3e-5"),
        ("capture=hf", "deepspeed=zero2", "data.eval=null", "drafter.fc_norm=false"),
    ],
)
def test_overrides_compose_to_the_same_configuration(settings: tuple[str, ...]) -> None:
    for recipe, needed in (("kimi_k2_6", ()), ("any_target", ("target.model=a/b", "data.train=c"))):
        config = composed(recipe, *needed, *settings)
        again = composed(recipe, *(f"{key}={value}" for key, value in overrides_of(config).items()))
        assert without_plan(again) == without_plan(config)


def without_plan(config: RunConfig) -> dict[str, Any]:
    return {key: value for key, value in vars(config).items() if key != "plan"}


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "null"),
        (True, "true"),
        ("true", "'true'"),
        ("a'b", r"'a\'b'"),
        ([1, "b c"], "[1,'b c']"),
        (1.5, "1.5"),
    ],
)
def test_values_are_quoted_for_hydra(value: Any, text: str) -> None:
    assert assigned(value) == text
    assert re.fullmatch(r"\S.*", text)
