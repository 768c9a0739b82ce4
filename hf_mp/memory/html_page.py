"""Shared by our HTML pages: the template environment, and the style."""

from __future__ import annotations

from pathlib import Path

import jinja2

from hf_mp.memory.sizes import readable


def page_template(name: str) -> jinja2.Template:
    """A template by its path below ``hf_mp/``, with autoescape; it may ``include`` ``memory/page_style.css``."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("hf_mp", ""),
        # Names of models and of runs come from outside.
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["readable"] = readable
    return environment.get_template(name)


def check_writable(path: Path) -> None:
    """Raise early if ``path`` cannot be written."""
    if path.is_dir():
        raise ValueError(f"{path} is a directory: name a file, as in {path / 'report.html'}")
    if not path.parent.is_dir():
        raise ValueError(f"{path} cannot be written: there is no directory {path.parent}")
