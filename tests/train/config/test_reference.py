"""The configuration reference follows the schema."""

from pathlib import Path

from train.config.reference import page

ROOT = Path(__file__).resolve().parents[3]


def test_the_committed_page_is_current() -> None:
    remedy = "python -m train.config.reference > docs/configuration.md"
    assert (ROOT / "docs" / "configuration.md").read_text() == page(), remedy
