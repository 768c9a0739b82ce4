"""A griffe extension that renders this project's docstrings for mkdocstrings.

Our docstrings name things as Sphinx does (``:class:`Name```), end a line before an example with ``::`` and explain what
belongs together in one line (``inputs, outputs: ...``); in editors and in ``help()`` that reads well. The site is
Markdown, where roles become links, the second colon goes, and each name has an entry.
"""

from __future__ import annotations

import dataclasses
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

from griffe import (
    Attribute,
    Docstring,
    ExprCall,
    Extension,
    NameResolutionError,
    Object,
    get_logger,
)

ROLE = re.compile(r":(?:attr|class|data|exc|func|meth|mod):`~?([\w.]+)`")

# In a section, names that are explained together, with all lines of the explanation.
TOGETHER = re.compile(r"^    (?P<names>\w+(?:, \w+)+): (?P<text>.*(?:\n {5,}.*)*)", re.MULTILINE)

# Through mkdocs' log, so that a strict build fails.
logger = get_logger("mkdocs.plugins.docs_docstrings")


class ProjectDocstrings(Extension):
    """Turns Sphinx roles into links, and the ``help`` of a dataclass field into the docstring of its attribute."""

    def on_package(self, *, pkg: Object, **kwargs: Any) -> None:
        """Go through all objects once everything is loaded, so that names can be looked up."""
        known: defaultdict[str, list[str]] = defaultdict(list)
        for name, path in _names(pkg):
            known[name].append(path)
        _rewrite(pkg, known)


def _names(obj: Object) -> Iterator[tuple[str, str]]:
    """The name and the full path of each object that is defined below ``obj``; aliases lead elsewhere."""
    for member in obj.members.values():
        if isinstance(member, Object):
            yield member.name, member.path
            if not member.is_function:
                yield from _names(member)


def _rewrite(obj: Object, known: Mapping[str, list[str]]) -> None:
    if isinstance(obj, Attribute):
        _read_field(obj)
    if obj.docstring is not None:
        linked = ROLE.sub(lambda role: _link(role[1], obj, known), obj.docstring.value)
        obj.docstring.value = re.sub(r"::$", ":", TOGETHER.sub(_one_by_one, linked), flags=re.MULTILINE)
    for member in obj.members.values():
        if isinstance(member, Object):
            _rewrite(member, known)


def _one_by_one(together: re.Match[str]) -> str:
    return "\n".join(f"    {name}: {together['text']}" for name in together["names"].split(", "))


def _link(name: str, obj: Object, known: Mapping[str, list[str]]) -> str:
    path = _resolve(name, obj, known)
    if path is None:
        logger.warning(f"{obj.path}: the docstring names {name!r}, of which there is none or more than one")
        return f"`{name}`"
    # Optional: what has no entry of its own on the site stays a name.
    return f'<autoref identifier="{path}" optional><code>{name}</code></autoref>'


def _resolve(name: str, obj: Object, known: Mapping[str, list[str]]) -> str | None:
    """The full path of what a docstring names: as seen from its object, or else the only one in the package."""
    first, _, rest = name.partition(".")
    try:
        starts = [first if first == obj.package.name else obj.resolve(first)]
    except NameResolutionError:
        starts = known[first]
    found = {_find(start, rest, obj) for start in starts} - {None}
    return found.pop() if len(found) == 1 else None


def _find(start: str, rest: str, obj: Object) -> str | None:
    try:
        found = obj.modules_collection[start]
        for name in filter(None, rest.split(".")):
            found = found.all_members[name]  # inherited ones too
        return found.canonical_path
    except KeyError:
        return None


def _read_field(attribute: Attribute) -> None:
    """Show a field of a dataclass as its default, explained by the ``help`` that HfArgumentParser shows as well."""
    if not isinstance(attribute.value, ExprCall) or attribute.parent is None:
        return
    owner = getattr(import_module(attribute.module.path), attribute.parent.name, None)
    found = getattr(owner, "__dataclass_fields__", {}).get(attribute.name)
    if found is None:
        return
    attribute.value = None if found.default is dataclasses.MISSING else repr(found.default)
    if attribute.docstring is None and "help" in found.metadata:
        attribute.docstring = Docstring(found.metadata["help"], parent=attribute)
