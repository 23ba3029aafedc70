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
        "data.train='a=b.jsonl'",
        "drafter=eagle3",
        "deepspeed=zero2",
        "++train.max_steps=3",
        "~data.eval",
        "drafter.aux_layer_ids=[1,2,3]",
        "drafter.aux_layer_ids=null",
        "optim.lr=1e-3",
        "optim.schedule=linear",
        "output_dir='runs/a,b'",
        "output_dir=${oc.env:HOME}/runs",
    ],
)
def test_known_keys_and_groups_pass_unchanged(argument: str) -> None:
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
        ("tracking.projekt=a", "tracking.project"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_ones(argument: str, suggested: str) -> None:
    with pytest.raises(UserError, match="There is no such key") as caught:
        checked(["recipe=quickstart", argument])
    assert (caught.value.field, caught.value.value) == tuple(argument.split("="))
    assert suggested in caught.value.remedy


# Hydra's own settings have no effect on a composed configuration.
@pytest.mark.parametrize("argument", ["zzzzzzzz=1", "hydra.verbose=true", "hydra/job_logging=none"])
def test_a_key_like_no_other_is_refused_with_the_way_to_list_all(argument: str) -> None:
    with pytest.raises(UserError, match="--cfg job"):
        checked([argument])


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


@pytest.mark.parametrize(
    ("argument", "remedy"),
    [
        ("recipe=quikstart", "There is no such choice. Did you mean quickstart?"),
        ("recipe=zzz", "Choose one of any_target, "),
        ("drafter=eagle4", "Did you mean eagle3 or eagle31?"),
        ("launcher=zzz", "Choose one of local, slurm."),
        ("train.max_steps=abc", "Give a whole number, or null."),
        ("train.ttt_steps=1.5", "Give a whole number."),
        ("optim.lr=fast", "Give a number, or null."),
        ("drafter.fc_norm=7.5", "Give true or false."),
        ("deepspeed.precision=bf61", "Did you mean bf16?"),
        ("stages=[fly]", "Give a list of plan, data, "),
        ("stages=[]x", "quotes"),
        ("drafter.aux_layer_ids=[a]", "Give a list, each entry a whole number, or null."),
        ("train.max_steps=1,2", "Give one value."),
        ("data.train=[a", "Put a value that has special characters into quotes"),
        ("data.template_kwargs.x={a", "Put a value that has special characters into quotes"),
        ("train=3", "It is a group of keys; set one of them."),
        ("+train.later=1", "There is no such key."),
        ("++train.later=1", "There is no such key."),
    ],
)
def test_a_value_that_no_recipe_takes_is_refused_with_what_it_takes(argument: str, remedy: str) -> None:
    with pytest.raises(UserError) as caught:
        checked([argument])
    field, _, value = argument.lstrip("+").partition("=")
    assert (caught.value.field, caught.value.value) == (field, value)
    assert remedy in caught.value.remedy


def test_an_argument_without_a_value_is_refused() -> None:
    with pytest.raises(UserError, match="argument=quickstart: Write it as key=value"):
        checked(["quickstart"])


@pytest.mark.parametrize("mode", ["online", "offline"])
def test_a_capture_group_names_the_source_too(mode: str) -> None:
    with pytest.raises(UserError, match=f"capture={mode}: .*hf.*vllm.*capture.mode={mode}"):
        checked([f"capture={mode}"])
