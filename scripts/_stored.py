"""Stored results, read field by field: one that is missing is named, with the command that stores it anew."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class StoredResultError(ValueError):
    """A stored result is missing, or lacks what a table needs."""


@dataclass(frozen=True)
class Stored:
    """What a script stored with ``save_result``, or a part of it.

    Attributes:
        file: name of the file.
        record: all of it.
        value: the part that this is about.
        path: where that is in the record.
    """

    file: str
    record: dict[str, Any]
    value: Any
    path: tuple[str, ...] = ()

    def __getitem__(self, key: str) -> Stored:
        """A part.

        Raises:
            StoredResultError: where it is missing.
        """
        if not isinstance(self.value, dict) or self.value.get(key) is None:
            where = " > ".join((*self.path, key))
            raise StoredResultError(f"{self.file} has no {where}: store it anew with {self.record.get('command')!r}")
        return Stored(self.file, self.record, self.value[key], (*self.path, key))

    def __contains__(self, key: str) -> bool:
        return isinstance(self.value, dict) and self.value.get(key) is not None

    def parts(self) -> list[tuple[str, Stored]]:
        """Names and parts of a mapping, in their order.

        Raises:
            StoredResultError: for anything but a mapping with something in it.
        """
        if not isinstance(self.value, dict) or not self.value:
            raise StoredResultError(f"{self.file}: {' > '.join(self.path)} is not a mapping with entries")
        return [(key, self[key]) for key in self.value]

    @property
    def number(self) -> float:
        """The value, which must be a number.

        Raises:
            StoredResultError: where it is not.
        """
        if isinstance(self.value, bool) or not isinstance(self.value, (int, float)):
            raise StoredResultError(f"{self.file}: {' > '.join(self.path)} is {self.value!r}, not a number")
        return self.value

    @property
    def text(self) -> str:
        """The value, for reading."""
        return str(self.value)

    @property
    def root(self) -> Stored:
        """The whole record, with date, command, device and versions."""
        return Stored(self.file, self.record, self.record)


Results = Callable[[str], Stored]


@dataclass(frozen=True)
class StoredResults:
    """The results in one folder, by their names; called with a name, it gives what was stored under ``result``."""

    directory: Path

    def __call__(self, name: str) -> Stored:
        """Raises StoredResultError where there is no such file."""
        path = self.directory / f"{name}.json"
        if not path.exists():
            raise StoredResultError(
                f"there is no {path.name} in {self.directory.name}/: run the script of that name in scripts/"
            )
        record = json.loads(path.read_text(encoding="utf-8"))
        return Stored(path.name, record, record)["result"]

    def __contains__(self, name: str) -> bool:
        return (self.directory / f"{name}.json").exists()

    def inside(self, folder: str) -> StoredResults:
        """Those in a folder of this one."""
        return StoredResults(self.directory / folder)
