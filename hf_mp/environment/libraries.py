"""Whether the optional libraries, bitsandbytes and Triton, work here."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import logging
import os
from collections.abc import Iterator
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


def bitsandbytes_status() -> str:
    """Its version, and whether bitsandbytes can quantize: tries one small NF4 weight, on a GPU if there is one."""
    with quiet_bitsandbytes():
        module, problem = _import("bitsandbytes")
    if module is None:
        return str(problem)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    weight = torch.ones(64, 64, device=device)
    try:
        packed, state = module.functional.quantize_4bit(weight, quant_type="nf4")
        restored = module.functional.dequantize_4bit(packed, state)
    except Exception as error:  # whatever its native library raises: it does not work here, and that is the answer
        return f"{module.__version__}, cannot quantize on {device}: {first_line(error)}"
    if not torch.equal(restored, weight):
        return f"{module.__version__}, gives wrong numbers on {device}"
    return f"{module.__version__}, quantizes on the {'GPU' if device == 'cuda' else 'CPU'}"


def triton_status() -> str:
    """Triton's version, and whether it has a device to run kernels on."""
    module, problem = _import("triton")
    if module is None:
        return str(problem)
    if torch.cuda.is_available():
        return f"{module.__version__}, compiles for the GPU"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return f"{module.__version__}, interpreted on the CPU (TRITON_INTERPRET=1)"
    return f"{module.__version__}, no GPU to compile for; plain PyTorch runs instead"


def _import(name: str) -> tuple[Any, str | None]:
    """The module, or None and the reason."""
    if importlib.util.find_spec(name) is None:
        return None, f"not installed: pip install {name}"
    try:
        return importlib.import_module(name), None
    except Exception as error:  # a broken installation is what this is to find
        return None, f"cannot be imported: {first_line(error)}"


def first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
