"""Jinja templates of pages and scripts."""

import shlex
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template


def template(path: Path, autoescape: bool = False) -> Template:
    """Return a template, which may include files next to it and has the filter `quoted`, for a shell."""
    environment = Environment(
        loader=FileSystemLoader(path.parent),
        autoescape=autoescape,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["quoted"] = shlex.quote
    return environment.get_template(path.name)
