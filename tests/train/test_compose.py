from pathlib import Path

import pytest

from eagle31.errors import UserError
from train import compose
from train.compose import compose_config, composed, recipe_name

NEEDED = ["target.model=somewhere", "data.train=some.jsonl"]


def test_a_run_knows_its_recipes_name() -> None:
    assert composed(["recipe=any_target", *NEEDED]).output_dir == "outputs/any_target"


def test_a_missing_recipe_is_refused_with_the_recipes_there_are() -> None:
    with pytest.raises(UserError, match=r"Give recipe=NAME with one of any_target, .*quickstart"):
        recipe_name(["train.max_steps=3"])


def test_a_value_that_the_recipe_leaves_open_is_named() -> None:
    with pytest.raises(UserError, match=r"target\.model=\?\?\?: This recipe needs a value for it"):
        composed(["recipe=any_target"])


def test_a_reference_to_nothing_is_the_users_mistake() -> None:
    with pytest.raises(UserError, match="'nowhere' not found"):
        composed(["recipe=any_target", *NEEDED, "output_dir=${nowhere}/runs"])


def test_a_mistake_in_a_recipes_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipes = tmp_path / "recipes"
    recipes.mkdir()
    for name in compose.RECIPES.iterdir():
        if name.name != "recipe":
            (recipes / name.name).symlink_to(name)
    (recipes / "recipe").mkdir()
    (recipes / "recipe" / "quickstart.yaml").write_text("# @package _global_\ntrain:\n  max_step: 3\n")
    monkeypatch.setattr(compose, "RECIPES", recipes)
    with pytest.raises(UserError) as caught:
        compose_config(["recipe=quickstart"])
    assert caught.value.field == "recipe"
    assert "max_step" in caught.value.remedy
    assert "HYDRA_FULL_ERROR" not in caught.value.remedy
