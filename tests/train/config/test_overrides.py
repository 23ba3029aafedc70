import pytest

from eagle31.errors import UserError
from train.config.overrides import checked


@pytest.mark.parametrize(
    "argument",
    [
        "recipe=quickstart",
        "train.max_steps=3",
        "data.regenerate.enabled=true",
        "stages=[data,vocab]",
        "data.train=a=b.jsonl",
        "drafter=eagle3",
        "deepspeed=zero2",
        "hydra.verbose=true",
        "hydra/job_logging=none",
        "+train.later=1",
        "~data.eval",
        "--cfg",
        "job",
    ],
)
def test_known_keys_groups_and_hydra_options_pass_unchanged(argument: str) -> None:
    assert checked([argument]) == [argument]


@pytest.mark.parametrize(
    ("argument", "suggested"),
    [
        ("train.max_step=3", "train.max_steps"),
        ("trian.max_steps=3", "train.max_steps"),
        ("max_steps=3", "train.max_steps"),
        ("target.draft_vocab_size=100", "drafter.draft_vocab_size"),
        ("zero_stage=1", "deepspeed.zero_stage"),
        ("data.regenerate.temprature=1", "data.regenerate.temperature"),
        ("tracking.mod=offline", "tracking.mode"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_ones(argument: str, suggested: str) -> None:
    with pytest.raises(UserError, match="There is no such key") as caught:
        checked(["recipe=quickstart", argument])
    assert (caught.value.field, caught.value.value) == tuple(argument.split("="))
    assert suggested in caught.value.remedy


def test_a_key_like_no_other_is_pointed_to_the_whole_list() -> None:
    with pytest.raises(UserError, match="--cfg job"):
        checked(["zzzzzzzz=1"])


def test_a_key_below_a_plain_value_is_refused() -> None:
    with pytest.raises(UserError, match=r"train\.max_steps\.more"):
        checked(["train.max_steps.more=1"])


def test_free_form_dictionaries_accept_any_key() -> None:
    given = [
        "data.template_kwargs.enable_thinking=false",
        "data.template_kwargs={enable_thinking: false}",
        "drafter.rope_parameters.rope_theta=1e6",
    ]
    assert checked(given) == [f"++{argument}" for argument in given]
    with pytest.raises(UserError):
        checked(["data.template_kwargsenable_thinking=false"])
