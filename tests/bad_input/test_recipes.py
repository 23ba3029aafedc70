"""Recipes and settings that no run could use: refused before anything is read."""

from tests.bad_input.commands import Case, CheckCase, each

CASES = [
    Case("recipe_typo", ("recipe=quick",), ("recipe=quick: ", "Did you mean quickstart?")),
]


@each(CASES)
def test_a_mistake_is_one_message(case: Case, check_case: CheckCase) -> None:
    check_case(case)
