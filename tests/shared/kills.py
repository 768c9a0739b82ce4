"""A process that is killed at one of its calls to the system, played in this one."""

from __future__ import annotations

import os
from typing import Any

import pytest


class Killed(BaseException):
    pass


def kill_at(patch: pytest.MonkeyPatch, number: int) -> list[str]:
    """Have the call ``number`` to the system not return, and none after it be made; gives the calls."""
    calls: list[str] = []

    def counted(name: str, real: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            if len(calls) >= number:
                raise Killed
            return real(*args, **kwargs)

        return call

    for name in ("rename", "fsync", "rmdir", "unlink", "mkdir", "open"):
        patch.setattr(os, name, counted(name, getattr(os, name)))
    return calls
