"""Warnings that point at the user's own line, whichever library called hf_mp."""

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
    while frame.f_back is not None and module_of_frame(frame).partition(".")[0] in _LIBRARIES:
        frame = frame.f_back
        level += not module_of_frame(frame).startswith("importlib._bootstrap")  # which warnings itself does not count
    warnings.warn(message, stacklevel=level)


def module_of_frame(frame: types.FrameType) -> str:
    """The name of the module whose code a frame runs; empty where it has none."""
    return frame.f_globals.get("__name__") or ""
