"""Paths that a file names: whether they stay in its directory."""

from __future__ import annotations

from pathlib import PurePosixPath, PureWindowsPath


def is_inside(name: str) -> bool:
    """Whether ``name`` is a plain relative path below the directory it is joined to, on any system."""
    path = PurePosixPath(name)
    return (
        bool(path.parts)
        and str(path) == name
        and ".." not in path.parts
        and not path.is_absolute()
        and not PureWindowsPath(name).anchor
        and not set(name) & {"\\", "\0"}
    )
