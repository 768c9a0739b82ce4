"""What bitsandbytes prints when it is imported, and what errors of libraries say first."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator


@contextlib.contextmanager
def quiet_bitsandbytes() -> Iterator[None]:
    """To import bitsandbytes in, or peft or Transformers' Trainer, which import it.

    On CPUs with BF16 products its import warns that a package is missing, which only makes 4-bit products faster.
    """
    logger = logging.getLogger("bitsandbytes")
    # By its logger: the warning is logged, so that Python's filters of warnings do not reach it.
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
