"""Shortens the messages of other libraries."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator


@contextlib.contextmanager
def quiet_bitsandbytes() -> Iterator[None]:
    """Silence the import of bitsandbytes, which on CPUs warns of a package that makes 4-bit matmuls faster."""
    logger = logging.getLogger("bitsandbytes")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def first_line(error: Exception) -> str:
    """Return the first line of the message, or the name of the class."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
