"""The commands in the headers of recipes, which the tests run as they stand."""

import re
from itertools import takewhile

from tests.runs.forked import ROOT

RECIPES = sorted(
    path.stem
    for path in (ROOT / "recipes" / "recipe").glob("*.yaml")
    if path.stem not in ("adapt", "any_target", "quickstart")
)


def header_commands(recipe: str, program: str) -> list[list[str]]:
    """Return the arguments of each command in a recipe's header that starts `program`.

    Args:
        program: "torchrun" or "scripts/submit".
    """
    joined = header(f"recipe/{recipe}").replace("\\\n", "")
    return [line.split() for line in re.findall(rf"(?m)^.*?\b{program} +(.*)$", joined)]


def header(name: str) -> str:
    """Return the comment at the top of recipes/NAME.yaml."""
    lines = (ROOT / "recipes" / f"{name}.yaml").read_text().splitlines()
    return "\n".join(line.removeprefix("#") for line in takewhile(lambda line: line.startswith("#"), lines))
