"""HTML pages that are a single file: text, style and figures, and nothing that a browser would load."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from train.reporting.colors import COLORS
from train.reporting.plots import Panel, to_svg
from train.reporting.results import with_interval


def render_page(template: str, figures: Mapping[str, Panel], **values: Any) -> str:
    """Return the page of a template in `templates`, which shows a panel with `figure(name)`."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"duration": _duration, "with_interval": with_interval}
    return environment.get_template(template).render(
        colors=COLORS,
        figures={name: (panel, to_svg(panel)) for name, panel in figures.items()},
        **values,
    )


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"
