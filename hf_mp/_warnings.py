"""Warnings that point at the user's own line, whichever library called ours."""

from __future__ import annotations

import sys
import types
import warnings

_LIBRARIES = ("hf_mp", "torch", "transformers", "accelerate", "peft", "trl", "lightning", "importlib")


def warn_caller(message: str) -> None:
    """A warning at the line that led here, outside of these libraries: Python's filters show it once for each line.

    In a thread without such a line, as autograd has them, at its outermost one.
    """
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and _module_of(frame).partition(".")[0] in _LIBRARIES:
        frame = frame.f_back
        level += not _module_of(frame).startswith("importlib._bootstrap")  # which warnings itself does not count
    warnings.warn(message, stacklevel=level)


def _module_of(frame: types.FrameType) -> str:
    return frame.f_globals.get("__name__") or ""
