"""Warnings at the line of user code, also if another library has called hf_mp."""

from __future__ import annotations

import sys
import types
import warnings

_LIBRARIES = ("hf_mp", "torch", "transformers", "accelerate", "peft", "trl", "lightning", "importlib")


def warn_caller(message: str) -> None:
    """Warn at the innermost line outside ``_LIBRARIES``, or else at the thread's outermost line.

    Python's filters show the warning once for each line.
    """
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and module_of_frame(frame).partition(".")[0] in _LIBRARIES:
        frame = frame.f_back
        # `stacklevel` does not count the frames of importlib.
        level += not module_of_frame(frame).startswith("importlib._bootstrap")
    warnings.warn(message, stacklevel=level)


def module_of_frame(frame: types.FrameType) -> str:
    return frame.f_globals.get("__name__") or ""
