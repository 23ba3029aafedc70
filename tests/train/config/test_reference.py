"""The configuration reference follows the schema."""

import dataclasses
from enum import Enum

import pytest

from tests.test_layout import ROOT
from train.config.overrides import schema_keys
from train.config.reference import descriptions, groups, page


def test_the_committed_page_is_current() -> None:
    remedy = "python -m train.config.reference > docs/configuration.md"
    assert (ROOT / "docs" / "configuration.md").read_text() == page(), remedy


def test_every_key_has_a_row() -> None:
    group_keys = {group.key for group in groups()}
    keys = schema_keys() - group_keys
    assert keys
    rows = page()
    for key in keys:
        assert f"\n| `{key}` |" in rows, key
    for key in group_keys - {""}:
        assert f"\n## {key}\n" in rows, key


@pytest.mark.parametrize("group", groups(), ids=lambda group: group.key or "run")
def test_every_key_has_a_description(group) -> None:
    comments = descriptions(group.schema)
    values = [
        field
        for field in dataclasses.fields(group.schema)
        if not dataclasses.is_dataclass(field.default_factory)
    ]
    missing = [field.name for field in values if not comments[field.name]]
    assert not missing


class Colour(Enum):
    # Directly above,
    # on two lines.
    red = "red"
    green = "green"  # trailing

    # A heading for what follows, with a blank line.

    blue = "blue"


def test_a_description_is_the_comment_above_and_the_trailing_one() -> None:
    assert descriptions(Colour) == {"red": "Directly above, on two lines.", "green": "trailing", "blue": ""}
