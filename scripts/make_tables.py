"""Writes the stored results into the README and the pages of docs/, and draws their pictures.

    python scripts/make_tables.py             # rewrites what is between the markers, and draws what is stale
    python scripts/make_tables.py --check     # changes nothing; fails where a page or a picture is not of these results

A region lies between ``<!-- figures: NAME -->`` and ``<!-- end of figures -->``; scripts/_regions.py has a function for
each.
"""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from _plots import digest, draw_losses, draw_scales, draw_steps, draw_traces, drawn_from
from _regions import REGIONS
from _results import RESULTS, ROOT
from _stored import StoredResultError, StoredResults

REGION = re.compile(r"(<!-- figures: (?P<name>[^>]*?) -->\n)(?P<text>.*?)(<!-- end of figures -->)", re.DOTALL)
MARKER = re.compile(r"<!-- (figures: [^>]*|end of figures) -->")

PICTURES: dict[str, Callable[[Mapping[str, Any], Path], None]] = {
    "bench_step": draw_steps,
    "compare_precisions": draw_losses,
    "compare_precisions_768": draw_losses,
    "compare_scalers": draw_scales,
    "compare_scaler_traces": draw_traces,
}


def pages() -> list[Path]:
    """The README and the pages of docs/."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def rewritten(text: str, results: StoredResults, page: str) -> str:
    """``text`` with its regions made from ``results``.

    Raises:
        StoredResultError: for a region that is not known, markers without their counterpart, and results that lack
            what a region needs.
    """

    def replace(found: re.Match[str]) -> str:
        name = found["name"]
        if name not in REGIONS:
            raise StoredResultError(f"{page} has a region {name!r}: use one of {', '.join(REGIONS)}")
        return f"{found[1]}\n{REGIONS[name](results)}\n\n{found[4]}"

    if len(MARKER.findall(text)) != 2 * len(REGION.findall(text)):
        raise StoredResultError(f"{page} has markers of figures that do not come in pairs")
    return REGION.sub(replace, text)


def stale_pages(results: StoredResults, files: Sequence[Path]) -> dict[Path, tuple[str, str]]:
    """The pages that are not of ``results``, each as it is and as it should be."""
    found = {}
    for file in files:
        text = file.read_text(encoding="utf-8")
        fresh = rewritten(text, results, file.name)
        if fresh != text:
            found[file] = (text, fresh)
    return found


def stale_pictures(results: StoredResults) -> dict[Path, str]:
    """The pictures that are missing or were not drawn from ``results``, with the names of these."""
    found = {}
    for name in PICTURES:
        path = results.directory / f"{name}.png"
        if name not in results:
            continue  # a page that shows it is refused
        if not path.exists() or drawn_from(path) != digest(results(name).value):
            found[path] = name
    return found


def main(
    check: Annotated[bool, typer.Option("--check", help="change nothing, fail where something is stale")] = False,
    results_dir: Path = RESULTS,
) -> None:
    """Rewrite, or check."""
    results = StoredResults(results_dir)
    try:
        texts, pictures = stale_pages(results, pages()), stale_pictures(results)
        if not check:
            for file, (_, fresh) in texts.items():
                file.write_text(fresh, encoding="utf-8")
            for path, name in pictures.items():
                PICTURES[name](results(name).value, path)
    except StoredResultError as error:
        sys.exit(f"cannot make the tables: {error}")
    if check:
        for file, (text, fresh) in texts.items():
            sys.stdout.writelines(difflib.unified_diff(
                text.splitlines(True), fresh.splitlines(True), f"{file.name}, as it is", f"{file.name}, as results say"
            ))  # fmt: skip
    for path in (*texts, *pictures):
        print(f"{'stale' if check else 'wrote'}: {path.name}")
    if check and (texts or pictures):
        sys.exit("run `make tables`")


if __name__ == "__main__":
    typer.run(main)
