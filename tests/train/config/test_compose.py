"""A recipe and the arguments on the command line become a configuration, or a mistake that is named."""

from pathlib import Path

import pytest

from eagle31.errors import UserError
from train.config import compose
from train.config.compose import compose_config, composed, recipe_name
from train.drafter.published import fetch_checkpoint

NEEDED = ["recipe=any_target", "target.model=somewhere", "data.train=some.jsonl"]


def test_a_run_knows_its_recipes_name() -> None:
    assert composed(NEEDED).output_dir == "outputs/any_target"


def test_a_missing_recipe_or_value_is_refused_with_what_to_give() -> None:
    with pytest.raises(UserError, match=r"any_target, .*quickstart"):
        recipe_name(["train.max_steps=3"])
    with pytest.raises(UserError, match=r"^data\.train=: Give data\.train=VALUE"):
        composed(NEEDED[:2])


@pytest.mark.parametrize(
    ("argument", "remedy"),
    [
        ("trian.max_steps=3", "train.max_steps"),
        ("zero_stage=1", "deepspeed.zero_stage"),
        ("recipe=quikstart", "quickstart"),
        ("recipe=xyz", "any_target, deepseek_v3"),
        ("evaluate.draft_tokens=0", "at least 1"),
        ("evaluate.draft_tokens=65", "at most 64"),
        ("capture=online", "hf_online"),
        ("train.max_steps=many", "many"),
        ("deepspeed.precision=fp16", "bf16"),
        ("stages=[fly]", "capture"),
        ("stages=plan", "stages=[plan]"),
        ("drafter.aux_layer_ids=3", "drafter.aux_layer_ids=[3]"),
        ("~train", "without a value"),
        ("~data.train", "without a value"),
        ("data.sources.a=3", "SourceConfig"),
        ("data.train=[a", "quotes"),
        ("quickstart", "key=value"),
        ("output_dir=${nowhere}/runs", "nowhere"),
        ("~data.template_kwargs", "within these"),
        ("~vllm.engine_args.x", "does not exist."),
    ],
)
def test_a_mistake_is_named_with_its_remedy(argument: str, remedy: str) -> None:
    with pytest.raises(UserError) as caught:
        composed([*NEEDED, argument])
    field, _, value = argument.lstrip("+").partition("=")
    assert caught.value.field in (field, "argument", field.removeprefix("~"))
    if value:
        assert (caught.value.field, str(caught.value.value)) == (field, value)
    assert remedy in caught.value.remedy


@pytest.mark.parametrize("values", [("5", "many"), ("many", "5"), ("???", "5", "many")])
def test_of_a_key_that_is_given_twice_the_wrong_value_is_named(values: tuple[str, ...]) -> None:
    with pytest.raises(UserError) as caught:
        composed([*NEEDED, *(f"train.max_steps={value}" for value in values)])
    assert (caught.value.field, caught.value.value) == ("train.max_steps", "many")


def test_a_path_may_begin_with_the_home_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/one")
    named = ["data.train=null", "data.sources.mine.source=~/a.jsonl", "capture.store='~/store'"]
    config = composed([*NEEDED, "output_dir=~/x", *named])
    assert (config.output_dir, config.capture.store) == ("/home/one/x", "/home/one/store")
    assert config.data.sources["mine"].source == "/home/one/a.jsonl"


def test_a_plus_has_no_meaning_for_keys_that_exist() -> None:
    assert composed([*NEEDED, "+train.max_steps=3"]).train.max_steps == 3


def test_free_mappings_take_any_key_and_named_members_any_name() -> None:
    config = composed(
        [
            *NEEDED,
            "data.train=null",
            "data.template_kwargs.a.b=1",
            "vllm.engine_args={x: 2}",
            "data.sources.mine.source=a.jsonl",
            "data.sources.mine.max_conversations=3",
        ]
    )
    assert config.data.template_kwargs == {"a": {"b": 1}}
    assert config.vllm.engine_args == {"x": 2}
    assert config.data.sources["mine"].max_conversations == 3


@pytest.mark.parametrize("recipe", ["kimi_k2_6", "qwen3_0_6b", "quickstart"])
def test_a_budget_replaces_what_the_recipe_sets(recipe: str) -> None:
    config = compose_config([f"recipe={recipe}", "budget=reproduce"])
    assert (config.data.max_samples, config.train.num_epochs) == (1_300_000, 5)
    assert config.train.max_steps is None


def test_adapting_has_few_steps_and_the_vocabulary_of_a_checkpoint_that_must_be_given() -> None:
    config = composed(["recipe=adapt", *NEEDED[1:]])
    assert config.train.max_steps == 160
    assert config.drafter.draft_vocab_size is None
    assert config.drafter.init_from is not None
    with pytest.raises(UserError, match=r"drafter\.init_from=.*the drafter to adapt"):
        fetch_checkpoint(config.drafter.init_from, None, "drafter.init_from")


@pytest.mark.parametrize("bfloat16", [False, True])
def test_without_a_gpu_any_target_is_small_and_has_the_precision_of_the_processor(
    bfloat16: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cpu.get_capabilities", lambda: {"amx_bf16": bfloat16})
    config = composed(NEEDED)
    assert config.deepspeed.precision.value == ("bf16" if bfloat16 else "fp32")
    assert (config.data.max_samples, config.train.max_steps) == (400, 120)
    assert composed([*NEEDED, "machine=gpus"]).data.max_samples == 50_000
    assert composed([*NEEDED, "machine=one_gpu"]).data.max_samples == 20_000
    online = composed([*NEEDED, "machine=one_gpu", "capture=hf_online"]).capture
    assert (online.mode.value, online.codec) == ("online", "fp8")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert composed(NEEDED).data.max_samples == 50_000


@pytest.mark.parametrize("text", ["train:\n  max_step: 3\n", "a: [1\n"])
def test_a_mistake_in_a_recipes_file_is_named(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in compose.RECIPES.iterdir():
        if name.name != "recipe":
            (tmp_path / name.name).symlink_to(name)
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "quickstart.yaml").write_text(f"# @package _global_\n{text}")
    monkeypatch.setattr(compose, "RECIPES", tmp_path)
    with pytest.raises(UserError) as caught:
        compose_config(["recipe=quickstart"])
    assert (caught.value.field, caught.value.value) == ("recipe", "quickstart")
    assert "HYDRA_FULL_ERROR" not in caught.value.remedy
