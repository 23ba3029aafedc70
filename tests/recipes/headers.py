"""The commands in the headers of recipes, which the tests run as they stand."""

import re

from tests.runs.forked import ROOT

RECIPES = sorted(
    path.stem
    for path in (ROOT / "recipes" / "recipe").glob("*.yaml")
    if path.stem not in ("any_target", "quickstart")
)


def header_commands(recipe: str, program: str) -> list[list[str]]:
    """Return the arguments of each command in a recipe's header that starts `program`.

    Args:
        program: "torchrun" or "scripts/submit".
    """
    header = (ROOT / "recipes" / "recipe" / f"{recipe}.yaml").read_text().replace("\\\n#", "")
    return [line.split() for line in re.findall(rf"(?m)^#.*?\b{program} +(.*)$", header)]


def header_ranks(recipe: str) -> int:
    """Return the number of processes in the header's torchrun command.

    Raises:
        ValueError: the header has no or several such commands, or one that says more than the recipe's name.
    """
    [command] = header_commands(recipe, "torchrun")
    *launcher, script, chosen = command
    if (script, chosen) != ("train/main.py", f"recipe={recipe}"):
        raise ValueError(f"{recipe}: {command}")
    if not launcher:
        return 1
    option, number = launcher
    if option != "--nproc-per-node":
        raise ValueError(f"{recipe}: {option}")
    return int(number)
