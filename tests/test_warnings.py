"""Warnings point at the user's line."""

from __future__ import annotations

import importlib
import threading
from pathlib import Path

import pytest

from hf_mp import _warnings


def test_the_line_that_imports_what_warns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "outer_of_two.py").write_text("import inner_of_two\n")
    (tmp_path / "inner_of_two.py").write_text("from hf_mp._warnings import warn_caller\n\nwarn_caller('a lack')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(_warnings, "_LIBRARIES", (*_warnings._LIBRARIES, "outer_of_two", "inner_of_two"))
    with pytest.warns(UserWarning, match="a lack") as caught:
        importlib.import_module("outer_of_two")
    assert caught[0].filename == __file__


def test_a_thread_without_a_line_of_the_users() -> None:
    thread = threading.Thread(target=_warnings.warn_caller, args=("a lack",))
    with pytest.warns(UserWarning, match="a lack") as caught:
        thread.start()
        thread.join()
    assert caught[0].filename == threading.__file__
