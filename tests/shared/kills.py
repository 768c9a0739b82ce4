"""What is on the disk if the process is killed at one of its system calls."""

from __future__ import annotations

import os
from typing import Any

import pytest


class Killed(BaseException):
    pass


def kill_at(patch: pytest.MonkeyPatch, number: int) -> list[str]:
    """Raise ``Killed`` in system call ``number`` and in each later one; gives the list of calls."""
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
