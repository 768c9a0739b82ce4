"""A page of HTML as its tags and its text."""

from __future__ import annotations

import html.parser
from typing import Any


class Outline(html.parser.HTMLParser):
    """Tags with their attributes, and the text; complains about what is not closed."""

    VOID = frozenset({"meta", "link", "br", "img", "line", "path", "rect"})

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag, tag

    def handle_data(self, data: str) -> None:
        self.text += data
