"""A griffe extension that renders this project's docstrings for mkdocstrings.

Our docstrings name things as Sphinx does (``:class:`Name```), end a line before an example with ``::`` and explain what
belongs together in one line (``inputs, outputs: ...``); in editors and in ``help()`` that reads well. The site is
Markdown, where roles become links, the second colon goes, and each name has an entry.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from functools import partial
from importlib import import_module
from typing import Any

from griffe import Attribute, Docstring, ExprCall, Extension, NameResolutionError, Object

ROLE = re.compile(r":(?:attr|class|data|exc|func|meth|mod):`~?([\w.]+)`")

# In a section, names that are explained together, with all lines of the explanation.
TOGETHER = re.compile(r"^    (?P<names>\w+(?:, \w+)+): (?P<text>.*(?:\n {5,}.*)*)", re.MULTILINE)


class ProjectDocstrings(Extension):
    """Turns Sphinx roles into links, and the ``help`` of a dataclass field into the docstring of its attribute."""

    def on_package(self, *, pkg: Object, **kwargs: Any) -> None:
        """Go through all objects once they are loaded, so that names can be looked up.

        Not ``on_object``, which comes after griffe has made the signatures of dataclasses from the fields' values.
        """
        for obj in _objects(pkg):
            if isinstance(obj, Attribute):
                _read_field(obj)
            if obj.docstring is not None:
                linked = ROLE.sub(partial(_link, obj), obj.docstring.value)
                obj.docstring.value = re.sub(r"::$", ":", TOGETHER.sub(_one_by_one, linked), flags=re.MULTILINE)


def _objects(obj: Object) -> Iterator[Object]:
    yield obj
    for member in obj.members.values():
        if isinstance(member, Object):  # an alias leads to an object that is defined elsewhere
            yield from _objects(member)


def _one_by_one(together: re.Match[str]) -> str:
    return "\n".join(f"    {name}: {together['text']}" for name in together["names"].split(", "))


def _link(obj: Object, role: re.Match[str]) -> str:
    """A link to what a role names where ``obj`` is defined, or else to a public name."""
    name, package = role[1], obj.package.name
    first, dot, rest = name.partition(".")
    try:
        path = package if first == package else obj.resolve(first)
    except NameResolutionError:
        path = f"{package}.{first}"
    # Optional: what has no entry of its own on the site stays a name.
    return f'<autoref identifier="{path}{dot}{rest}" optional><code>{name}</code></autoref>'


def _read_field(attribute: Attribute) -> None:
    """Show a field of a dataclass as its default, explained by the ``help`` that HfArgumentParser shows as well."""
    if not isinstance(attribute.value, ExprCall) or attribute.parent is None:
        return
    # Imported, since a field may be made by a function (`setting(...)`) whose default no reader of the source sees.
    owner = getattr(import_module(attribute.module.path), attribute.parent.name, None)
    found = getattr(owner, "__dataclass_fields__", {}).get(attribute.name)
    if found is None:
        return
    attribute.value = None if found.default is dataclasses.MISSING else repr(found.default)
    if attribute.docstring is None and "help" in found.metadata:
        attribute.docstring = Docstring(found.metadata["help"], parent=attribute)
