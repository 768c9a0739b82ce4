"""Warnings that point at the user's own line, whichever library called ours."""

from __future__ import annotations

import sys
import warnings

_LIBRARIES = ("hf_mp", "torch", "transformers", "accelerate", "importlib")


def warn_caller(message: str) -> None:
    """A warning at the line that led here, outside of all libraries: Python's filters show it once for each such line.

    Where the thread is autograd's own, at the line that autograd called.
    """
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _LIBRARIES:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)
