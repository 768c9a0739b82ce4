"""Runs ``hf-mp memory``."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import logging
import os
from collections.abc import Sequence
from typing import Any
from unittest import mock

from rich.console import Console
from transformers.utils import logging as transformers_logging

from hf_mp.environment.libraries import quiet_bitsandbytes
from hf_mp.memory.precisions import SHOWN_PRESETS
from hf_mp.memory.report import as_json as report_as_json
from hf_mp.memory.report import gather_report
from hf_mp.memory.sizes import parse_size
from hf_mp.memory.tables import render
from hf_mp.policy import PRESETS


def run(
    model: str,
    *,
    train: bool,
    gpu: str | None,
    precision: Sequence[str] | None,
    as_json: bool,
    **settings: Any,
) -> str:
    """Return the report as text."""
    if settings["ranks"] == 1 and settings["parallel"] != "fsdp2":
        raise ValueError("--parallel is for several ranks: say how many, as --ranks 64")
    quiet_libraries()
    _import_bitsandbytes()
    is_trained = train or gpu is not None or settings["ranks"] > 1
    with Console(stderr=True).status("") as line:  # prints nothing to a file or a pipe
        report = gather_report(
            model,
            gpu_bytes=None if gpu is None else parse_size(gpu),
            presets=precision or _default_presets(is_trained=is_trained, **settings),
            progress=lambda step: line.update(f"{step} ..."),
            **settings,
        )
    if as_json:
        return json.dumps(report_as_json(report), indent=2, allow_nan=False) + "\n"
    console = Console(file=io.StringIO())
    with console.capture() as tables:
        console.print(render(report, console.width))
    return "".join(f"{line.rstrip()}\n" for line in tables.get().splitlines())


def _default_presets(*, is_trained: bool, offload: str | None, **others: Any) -> Sequence[str]:
    if offload is not None:
        return [name for name, policy in PRESETS.items() if policy.is_lean]
    return SHOWN_PRESETS if is_trained else ()


def _import_bitsandbytes() -> None:
    """Import bitsandbytes, if installed, without torch.compile, which takes a quarter of the command's time."""
    with contextlib.suppress(ImportError), mock.patch.dict(os.environ, TORCHDYNAMO_DISABLE="1"), quiet_bitsandbytes():
        importlib.import_module("bitsandbytes")


def quiet_libraries() -> None:
    """Suppress warnings and progress bars between the tables."""
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    # torch logs a traceback if an op fails on fake tensors.
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it logs each matmul that it casts
