import sys
from pathlib import Path

import griffe
import pytest

EXTENSION = str(Path(__file__).resolve().parents[2] / "scripts" / "docs_docstrings.py")

MODULE = '''
from dataclasses import dataclass, field

CHOICES = ("a", "b")

@dataclass
class Settings:
    """What :func:`run` takes; see :class:`pkg.Settings`, :attr:`Settings.depth` and :class:`Nobody`::

        run(Settings())

    Attributes:
        depth, width: whole numbers,
            at least 1.
        name: any.
    """

    depth: int = field(default=1, metadata={"help": "How " "deep.", "choices": CHOICES})
    width: int = 1
    name: str = field(default_factory=str)

def run(settings):
    """No example here: a colon, and `one`, two: three."""
'''


def load(tmp_path: Path) -> griffe.Module:
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "__init__.py").write_text(MODULE)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(tmp_path)
        patch.delitem(sys.modules, "pkg", raising=False)
        extensions = griffe.load_extensions(EXTENSION)
        found = griffe.load("pkg", search_paths=[tmp_path], extensions=extensions, docstring_parser="google")
    assert isinstance(found, griffe.Module)
    return found


def test_roles_become_links(tmp_path):
    text = load(tmp_path)["Settings"].docstring.value
    for path, shown in (("pkg.run", "run"), ("pkg.Settings", "pkg.Settings"), ("pkg.Settings.depth", "Settings.depth")):
        assert f'<autoref identifier="{path}" optional><code>{shown}</code></autoref>' in text
    assert "<code>Nobody</code></autoref>:\n\n    run(Settings())" in text


def test_names_that_are_explained_together_come_one_by_one(tmp_path):
    sections = {section.kind.value: section.value for section in load(tmp_path)["Settings"].docstring.parsed}
    explained = {item.name: item.description for item in sections["attributes"]}
    assert explained == {name: "whole numbers,\nat least 1." for name in ("depth", "width")} | {"name": "any."}


def test_a_field_has_its_default_and_its_help(tmp_path):
    settings = load(tmp_path)["Settings"]
    assert (str(settings["depth"].value), settings["depth"].docstring.value) == ("1", "How deep.")
    assert settings["width"].docstring is None
    assert settings["name"].value is None


def test_other_text_stays(tmp_path):
    assert load(tmp_path)["run"].docstring.value == "No example here: a colon, and `one`, two: three."
