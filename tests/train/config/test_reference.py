"""The configuration reference follows the schema."""

from enum import Enum

from train.config.overrides import schema_keys
from train.config.reference import descriptions, groups, page


def test_every_key_has_a_row() -> None:
    group_keys = {group.key for group in groups()}
    keys = schema_keys() - group_keys
    assert keys
    rows = page()
    for key in keys:
        assert f"\n| `{key}` |" in rows, key
    for key in group_keys - {""}:
        assert f"\n## {key}\n" in rows, key


class Colour(Enum):
    # Directly above,
    # on two lines.
    red = "red"
    green = "green"  # trailing

    # A heading for what follows, with a blank line.

    blue = "blue"


def test_a_description_is_the_comment_above_and_the_trailing_one() -> None:
    assert descriptions(Colour) == {"red": "Directly above, on two lines.", "green": "trailing", "blue": ""}
