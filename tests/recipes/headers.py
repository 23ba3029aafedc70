"""The headers of recipes."""

from itertools import takewhile

from tests.runs.forked import ROOT

RECIPES = sorted(
    path.stem
    for path in (ROOT / "recipes" / "recipe").glob("*.yaml")
    if path.stem not in ("adapt", "any_target", "quickstart")
)


def header(name: str) -> str:
    """Return the comment at the top of recipes/NAME.yaml."""
    lines = (ROOT / "recipes" / f"{name}.yaml").read_text().splitlines()
    return "\n".join(line.removeprefix("#") for line in takewhile(lambda line: line.startswith("#"), lines))
