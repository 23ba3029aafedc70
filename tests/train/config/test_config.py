"""The checks of a recipe: types by Hydra, values by `check`."""

from copy import deepcopy
from functools import cache, reduce
from typing import Any

import pytest

from eagle31.errors import UserError
from tests.runs.forked import ROOT
from tests.train.torchrun import composed
from train.config.capture import CaptureMode
from train.config.run import RunConfig, check

RECIPES = ROOT / "recipes"
NEEDED = ["target.model=somewhere", "data.train=some.jsonl"]


@cache
def plain() -> RunConfig:
    return composed("any_target", *NEEDED, "machine=gpus", "deepspeed.zero_stage=0")


def changed(key: str, value: Any) -> RunConfig:
    config = deepcopy(plain())
    *groups, name = key.split(".")
    owner = reduce(getattr, groups, config)
    assert hasattr(owner, name), key
    setattr(owner, name, value)
    return config


def test_every_group_can_be_chosen() -> None:
    for path in RECIPES.glob("*/*.yaml"):
        group, name = path.parent.name, path.stem
        if group != "recipe":
            # A choice with several sources replaces the one in NEEDED.
            sources = ["data.train=null"] if group == "data" and name == "mixture" else []
            check(composed("any_target", f"{group}={name}", *NEEDED, *sources))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("capture.codec", "fp4"),
        ("data.max_tokens", 2049),
        ("deepspeed.offload_optimizer", True),
        ("evaluate.max_new_tokens", 2048),
        ("drafter.init_revision", "main"),
        ("vllm.engine_args", {"model": "a"}),
        ("vllm.engine_args", {"tensor_parallel_size": "eight"}),
        ("vllm.engine_args", {"gpu_memory_utilization": float("nan")}),
        ("vllm.servers", ["node1"]),
        ("target.device_map", "everywhere"),
        ("data.template_kwargs", {"a b": 1}),
        ("stages", []),
    ],
)
def test_values_that_do_not_go_together_are_refused_with_their_field(key: str, value: Any) -> None:
    with pytest.raises(UserError) as caught:
        check(changed(key, value))
    assert caught.value.field.startswith(key)
    assert caught.value.remedy.endswith(".")


def test_a_draft_has_to_fit_a_completion() -> None:
    check(composed("any_target", *NEEDED, "evaluate.max_new_tokens=5"))
    with pytest.raises(UserError, match=r"evaluate\.draft_tokens=4: .*max_new_tokens \(4\)"):
        check(composed("any_target", *NEEDED, "evaluate.max_new_tokens=4"))


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ("data.regenerate.enabled=false", "data.train"),
        ("data.self_prompts.num=64", "data.self_prompts.num"),
        ("data.self_prompts.max_new_tokens=2048", "data.self_prompts.max_new_tokens"),
        ("data.self_prompts.temperature=0", "data.self_prompts.temperature"),
    ],
)
def test_prompts_of_the_target_that_nothing_could_be_trained_on_are_refused(change: str, field: str) -> None:
    needed = ["target.model=somewhere", "data=self", "machine=gpus"]
    check(composed("any_target", *needed))
    check(composed("any_target", *needed, "data.self_prompts.num=64", "data.eval=some.jsonl"))
    with pytest.raises(UserError) as caught:
        check(composed("any_target", *needed, change))
    assert caught.value.field == field


@pytest.mark.parametrize("source", ["hf", "vllm"])
def test_capture_groups_set_source_and_mode_and_the_mode_alone_keeps_the_source(source: str) -> None:
    for settings in ([f"capture={source}_online"], [f"capture={source}", "capture.mode=online"]):
        capture = composed("any_target", *NEEDED, *settings).capture
        assert (capture.source.value, capture.mode) == (source, CaptureMode.online)
    capture = composed("any_target", *NEEDED, f"capture={source}").capture
    assert (capture.source.value, capture.mode) == (source, CaptureMode.offline)
