"""A hook of MkDocs: the pages of the documentation site that are made from what is in the checkout already.

The front page is the README, the page on the command is made from the command. Files that a page links to, such as
recipes, come as pages with their source.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from posixpath import normpath, relpath
from typing import Any

from jinja2 import Template
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from typer.cli import get_docs_for_click
from typer.main import get_command

from hf_mp import _HOME
from hf_mp.casting.tables import TABLES, CastRule
from hf_mp.cli import app

ROOT = Path(__file__).resolve().parent.parent
OF_THE_CHECKOUT = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")  # pages of the site, too

# a link or picture in Markdown that is neither a web address nor a place on the same page
LINK = re.compile(r"\]\((?!\w+:|#)(?P<path>[^)\s#]+)(?P<place>#[^)\s]*)?\)")

# A public name in the text of a page, and not in a link already; short ones (`load`) mean ours only after `hf_mp.`.
MENTION = re.compile(rf'(?<!">)<code>(?P<package>hf_mp\.)?(?P<name>{"|".join(_HOME)})(?:\(\))?</code>')


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the generated pages, and a page or a copy for each file that a page links to."""
    ops = files.get_file_from_path("reference/autocast_ops.md")
    assert ops is not None
    rules = {name: {op: rule for rule, op in tables.entries()} for name, tables in TABLES.items()}
    ops.content_string = Template(ops.content_string).render(rules=rules, CastRule=CastRule)
    generated = {
        "index.md": "---\nhide: [navigation]\n---\n" + (ROOT / "README.md").read_text(encoding="utf-8"),
        **{name.lower(): (ROOT / name).read_text(encoding="utf-8") for name in OF_THE_CHECKOUT},
        "reference/command_line.md": _command_line(),
    }
    for uri, text in generated.items():
        files.append(File.generated(config, uri, content=text))
    linked = {path for file in files.documentation_pages() for path in _linked_files(file)}
    for path in sorted(linked):
        target = _place_of(path)
        if target.startswith("source/"):
            files.append(File.generated(config, target, content=_source(path)))
        elif target == path:
            files.append(File.generated(config, target, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, *, page: Page, **kwargs: Any) -> str:
    """Have links to files of the checkout lead to where those are on the site."""
    uri = page.file.src_uri

    def place(link: re.Match[str]) -> str:
        path = _path_in_checkout(uri, link["path"])
        if not (ROOT / path).exists():
            return link[0]  # a page of the site, or wrong: MkDocs tells
        return f"]({relpath(_place_of(path), str(PurePosixPath(uri).parent))}{link['place'] or ''})"

    return LINK.sub(place, markdown)


def on_page_content(html: str, *, page: Page, **kwargs: Any) -> str:
    """Link public names in a guide to their entries in the reference, and fold the columns that name tests."""
    if page.file.src_uri.startswith(("reference/", "source/")):
        return html

    def entry(mention: re.Match[str]) -> str:
        name = mention["name"]
        if mention["package"] is None and not re.search("[A-Z_]", name):
            return mention[0]
        return f'<autoref identifier="hf_mp.{name}" optional>{mention[0]}</autoref>'

    return _with_foldable_tests(MENTION.sub(entry, html))


def _with_foldable_tests(html: str) -> str:
    """A box to tick before the first table with a column "shown by": ``site.css`` hides those columns until then."""
    html = html.replace("<th>shown by</th>", '<th class="shown-by">shown by</th>')
    before, table, after = html.partition("<table>")
    if 'class="shown-by"' not in html:
        return html
    box = '<p><label><input type="checkbox" id="show-tests"> Show the tests</label></p>\n'
    return f"{before}{box}{table}{after}"


def _linked_files(page: File) -> Iterator[str]:
    for link in LINK.finditer(page.content_string):
        if (ROOT / (path := _path_in_checkout(page.src_uri, link["path"]))).is_file():
            yield path


def _path_in_checkout(uri: str, link: str) -> str:
    """What a link on a page means in the checkout, where the README lies one folder above the other pages."""
    at_the_top = uri in ("index.md", *map(str.lower, OF_THE_CHECKOUT))
    folder = "." if at_the_top else str(PurePosixPath("docs", uri).parent)
    return normpath(f"{folder}/{link}")


def _place_of(path: str) -> str:
    """Where a file of the checkout is on the site."""
    pages = {
        "README.md": "index.md",
        "scripts/results": "reference/results.md",
        **{name: name.lower() for name in OF_THE_CHECKOUT},
    }
    if path in pages or path.startswith("docs/"):
        return pages.get(path, path.removeprefix("docs/"))
    return path if path.endswith((".png", ".svg", ".json")) else f"source/{path}.md"


def _source(path: str) -> str:
    language = {".py": "python", ".yaml": "yaml"}.get(PurePosixPath(path).suffix, "text")
    code = (ROOT / path).read_text(encoding="utf-8")
    header = "---\nsearch:\n  exclude: true\nhide: [toc]\n---\n"
    return f"{header}# {PurePosixPath(path).name}\n\n~~~~~~ {{.{language} title={path!r}}}\n{code}~~~~~~\n"


def _command_line() -> str:
    group: Any = get_command(app)
    context = group.make_context("hf-mp", [], resilient_parsing=True)
    commands = (
        get_docs_for_click(obj=group.get_command(context, name), ctx=context, indent=1, name=name, call_prefix="hf-mp")
        for name in group.list_commands(context)
    )
    return "\n".join(["# Command line\n", f"{group.help}\n", *commands])
