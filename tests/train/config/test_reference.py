"""The configuration reference follows the schema."""

from pathlib import Path

from train.config.reference import groups, page

ROOT = Path(__file__).resolve().parents[3]


def test_the_committed_page_is_current() -> None:
    remedy = "python -m train.config.reference > docs/configuration.md"
    assert (ROOT / "docs" / "configuration.md").read_text() == page(), remedy


def test_every_key_has_a_row() -> None:
    rows = page()
    for key, schema in groups():
        assert f"\n## {key or 'The run'}\n" in rows
        for name in schema.__dataclass_fields__:
            full = f"{key}.{name}" if key else name
            assert f"\n| `{full}` |" in rows or f"\n## {full}\n" in rows, full
