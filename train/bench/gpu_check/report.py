"""The page of a check."""

from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from eagle31.json_files import write_text
from train.reporting.colors import COLORS


def write_page(path: Path, found: dict[str, Any], summary: str) -> None:
    """Write the page of what `gpu_check.json` holds.

    Args:
        summary: how many parts passed, failed and were not run.
    """
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["value"] = format_value
    environment.filters["seconds"] = format_seconds
    template = environment.get_template("report_template.html")
    write_text(path, template.render(colors=COLORS, found=found, summary=summary))


def format_value(figure: dict[str, Any]) -> str:
    """Return a figure's value with its unit."""
    value = figure["value"]
    text = f"{value:,}" if isinstance(value, int | float) else str(value)
    return f"{text} {figure['unit']}".strip()


def format_seconds(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
