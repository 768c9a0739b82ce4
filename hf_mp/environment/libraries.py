"""Whether the optional libraries, bitsandbytes and Triton, can be imported here."""

from __future__ import annotations

import contextlib
import importlib
import logging
from collections.abc import Iterator

LIBRARIES = ("bitsandbytes", "triton")


@contextlib.contextmanager
def quiet_bitsandbytes() -> Iterator[None]:
    """To import bitsandbytes in, or peft or Transformers' Trainer, which import it.

    On CPUs with BF16 products its import warns that a package is missing, which only makes 4-bit products faster.
    """
    logger = logging.getLogger("bitsandbytes")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def library_status(name: str) -> str:
    """Version of a library, or why it cannot be imported."""
    try:
        with quiet_bitsandbytes():
            return str(importlib.import_module(name).__version__)
    except Exception as error:  # native libraries raise OSError, RuntimeError and more: a broken one is the answer
        return f"cannot be imported: {first_line(error)}"


def first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
