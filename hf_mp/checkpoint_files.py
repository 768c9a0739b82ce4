"""Whether the files of a checkpoint are whole, before anything is loaded from it."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

from safetensors import SafetensorError, safe_open


def check_readable(checkpoint: Path, exclude: tuple[str, ...] = ()) -> None:
    """Raise where a file of a checkpoint was cut off, so that a model is not loaded by half.

    Only headers and directories of the files are read: a disk that was full leaves those out or wrong.

    Args:
        checkpoint: a directory, as the Trainer saves it.
        exclude: names of files that somebody else looks at.

    Raises:
        ValueError: naming the file.
    """
    for path in sorted(checkpoint.iterdir()):
        if not path.is_file() or path.name in exclude:
            continue
        try:
            _check(path)
        except (ValueError, SafetensorError) as error:
            raise ValueError(
                f"cannot resume from {path}: it is damaged ({error}); the other files are as they were, use another "
                "checkpoint or delete this one"
            ) from error


def _check(path: Path) -> None:
    if path.suffix == ".json":
        json.loads(path.read_text(encoding="utf-8"))
    elif path.suffix == ".safetensors":
        with safe_open(path, framework="pt"):
            pass
    elif path.suffix in (".pt", ".pth", ".bin"):
        with path.open("rb") as file:
            start = file.read(2)
        if not start or (start == b"PK" and not zipfile.is_zipfile(path)):  # older files are no archives
            raise ValueError(f"its end is missing, at {path.stat().st_size} bytes")
