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
