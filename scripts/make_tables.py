"""Writes the stored results into the README and the pages of docs/.

    python scripts/make_tables.py             # rewrites what is between the markers
    python scripts/make_tables.py --check     # changes nothing; fails where a page is not of these results

A region lies between ``<!-- figures: NAME -->`` and ``<!-- end of figures -->``. What is in it says
``scripts/tables.toml``; a region that no page has fails with ``--check``.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from _results import RESULTS, ROOT
from _tables import Regions, StoredResultError

REGION = re.compile(r"(<!-- figures: (?P<name>[^>]*?) -->\n)(?P<text>.*?)(<!-- end of figures -->)", re.DOTALL)
MARKER = re.compile(r"<!-- (figures: [^>]*|end of figures) -->")


def pages() -> list[Path]:
    """The README and the pages of docs/."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def rewritten(text: str, regions: Regions, page: str) -> str:
    """``text`` with its regions made anew.

    Raises:
        StoredResultError: for a region that is not known, markers without their counterpart, and results that lack
            what a region needs.
    """
    if len(MARKER.findall(text)) != 2 * len(REGION.findall(text)):
        raise StoredResultError(f"{page} has markers of figures that do not come in pairs")
    return REGION.sub(lambda found: f"{found[1]}\n{regions(found['name'])}\n\n{found[4]}", text)


def stale_pages(regions: Regions, files: Sequence[Path]) -> dict[Path, str]:
    """The pages that are not of the stored results, as they should be."""
    texts = {file: file.read_text(encoding="utf-8") for file in files}
    fresh = {file: rewritten(text, regions, file.name) for file, text in texts.items()}
    return {file: text for file, text in fresh.items() if text != texts[file]}


def unused_regions(regions: Regions, files: Sequence[Path]) -> list[str]:
    """The regions that no page has."""
    used = {found["name"] for file in files for found in REGION.finditer(file.read_text(encoding="utf-8"))}
    return sorted(regions.regions.keys() - used)


def main(
    check: Annotated[bool, typer.Option("--check", help="change nothing, fail where something is stale")] = False,
    results_dir: Path = RESULTS,
) -> None:
    """Rewrite, or check."""
    try:
        regions = Regions(results_dir)
        texts = stale_pages(regions, pages())
    except StoredResultError as error:
        sys.exit(f"cannot make the tables: {error}")
    stale = ", ".join(path.name for path in texts)
    if check:
        if unused := unused_regions(regions, pages()):
            sys.exit(f"no page has the regions {', '.join(unused)}: delete them in scripts/tables.toml")
        sys.exit(f"stale: {stale}: run `make tables`, and look at what it changes" if stale else 0)
    for file, text in texts.items():
        file.write_text(text, encoding="utf-8")
    print(f"wrote: {stale or 'nothing'}")


if __name__ == "__main__":
    typer.run(main)
