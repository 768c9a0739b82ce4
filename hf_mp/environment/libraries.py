"""Whether the optional libraries, bitsandbytes and Triton, work here."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch


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
    """Version of a library of :data:`LIBRARIES` and whether it works here, or why it cannot."""
    if importlib.util.find_spec(name) is None:
        return f"not installed: pip install {name}"
    try:
        with quiet_bitsandbytes():
            module = importlib.import_module(name)
    except Exception as error:  # a broken installation is what this is to find
        return f"cannot be imported: {first_line(error)}"
    return f"{module.__version__}, {LIBRARIES[name](module)}"


def _quantizes(bitsandbytes: Any) -> str:
    """Tries one small NF4 weight, on a GPU if there is one."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    weight = torch.ones(64, 64, device=device)
    try:
        packed, state = bitsandbytes.functional.quantize_4bit(weight, quant_type="nf4")
        restored = bitsandbytes.functional.dequantize_4bit(packed, state)
    except Exception as error:  # whatever its native library raises: it does not work here, and that is the answer
        return f"cannot quantize on {device}: {first_line(error)}"
    if not torch.equal(restored, weight):
        return f"gives wrong numbers on {device}"
    return f"quantizes on the {'GPU' if device == 'cuda' else 'CPU'}"


def _compiles(triton: Any) -> str:
    """Whether there is a device to run kernels on."""
    if torch.cuda.is_available():
        return "compiles for the GPU"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "interpreted on the CPU (TRITON_INTERPRET=1)"
    return "no GPU to compile for; plain PyTorch runs instead"


LIBRARIES: dict[str, Callable[[Any], str]] = {"bitsandbytes": _quantizes, "triton": _compiles}


def first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
