from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from eagle31.errors import UserError
from tests.train.torchrun import checked_config
from train.experiments.quality.runs import budget_steps
from train.experiments.quality.sides import Side, chosen_sides, known_sides, parse_side

ROOT = Path(__file__).resolve().parents[4]


def test_sides_are_the_named_ones_and_then_the_others() -> None:
    sides = chosen_sides(["eagle31", "specforge"], ["two=train.ttt_steps=2 'tracking.name=two steps'"])
    assert sides[:2] == [Side("eagle31"), Side("specforge", is_peer=True)]
    assert sides[2] == Side("two", ("train.ttt_steps=2", "tracking.name=two steps"))


@pytest.mark.parametrize(
    ("names", "further", "field"),
    [
        (["eagle3"], [], "--sides"),
        ([], [], "--sides"),
        (["eagle31"], ["two"], "--side"),
        (["eagle31"], ["two="], "--side"),
        (["eagle31"], ["two=three"], "--side"),
        (["eagle31"], ["a/b=train.ttt_steps=2"], "--side"),
        (["eagle31"], ["speculators=train.ttt_steps=2"], "--side"),
        ([], ["two=train.ttt_steps=2", "two=train.ttt_steps=3"], "--side"),
        (["eagle31", "eagle31"], [], "--side"),
    ],
)
def test_bad_sides_are_refused(names: Sequence[str], further: Sequence[str], field: str) -> None:
    with pytest.raises(UserError) as refused:
        chosen_sides(names, further)
    assert refused.value.field == field


def test_adamw_replaces_what_a_recipe_sets() -> None:
    other = ["recipe=quickstart", "optim=muon", "optim.lr=3e-3", "optim.betas=[0.8,0.8]"]
    found = checked_config([*other, *known_sides()["eagle31-adamw"].overrides]).optim
    assert (found.name.value, found.lr, found.warmup_fraction) == ("adamw", None, 0.015)
    assert (found.betas, found.max_grad_norm) == ([0.9, 0.95], 0.5)
    published = checked_config(["recipe=quickstart", *known_sides()["eagle31-adamw-1e-4"].overrides]).optim
    assert published == replace(found, lr=1e-4)


def test_a_side_keeps_the_spaces_that_it_quotes() -> None:
    assert parse_side("a=optim.betas='[0.9, 0.99]'").overrides == ("optim.betas=[0.9, 0.99]",)


def test_the_steps_of_a_budget() -> None:
    assert budget_steps(10, 0.7) == 857
    assert budget_steps(0.001, 10) == 1
