"""``hf-mp memory``, from validated arguments to the text that it prints."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import typer
from rich.console import Console
from transformers.utils import logging as transformers_logging

from hf_mp.memory.html_page import check_writable
from hf_mp.memory.precisions import SHOWN_PRESETS
from hf_mp.memory.report import as_json as report_as_json
from hf_mp.memory.report import gather_report
from hf_mp.memory.sizes import parse_size
from hf_mp.memory.tables import render


def run(
    model: str,
    *,
    train: bool,
    measure: bool,
    device: str | None,
    gpu: str | None,
    bandwidth: str | None,
    precision: Sequence[str] | None,
    config_only: bool,
    as_json: bool,
    html: Path | None,
    **settings: Any,
) -> str:
    """Gather the report and return the text to print; with ``html``, also write the tables as a page."""
    _check(html, bandwidth, settings["ranks"], settings["parallel"])
    # Their remarks would stand between the tables.
    quiet_libraries()
    takes_steps = any((train, measure, gpu, settings["ranks"] > 1))
    report = gather_report(
        model,
        config_only=config_only,
        measure=measure,
        gpu_bytes=None if gpu is None else parse_size(gpu),
        presets=precision or (SHOWN_PRESETS if takes_steps else ()),
        # Lines, not one that is redrawn: a file or a pipe would get each state of it.
        progress=lambda step: typer.echo(f"hf-mp memory: {step} ...", err=True),
        # For a GPU, except where steps are also taken and there is none.
        device=device or ("cpu" if measure and not torch.cuda.is_available() else "cuda"),
        **settings,
    )
    console = Console(record=True, file=io.StringIO())
    console.print(render(report, console.width))
    if html is not None:
        console.save_html(str(html), clear=False)
    if as_json:
        return json.dumps(report_as_json(report), indent=2, allow_nan=False) + "\n"
    return "".join(f"{line.rstrip()}\n" for line in console.export_text().splitlines())


def _check(html: Path | None, bandwidth: str | None, ranks: int, parallel: str) -> None:
    """Refuse first of all what would be refused after minutes, or would be left out in silence."""
    if html is not None:
        check_writable(html)
    if bandwidth is not None:
        raise ValueError("--bandwidth is gone: divide what each rank sends, which the table has, by it")
    if ranks == 1 and parallel != "fsdp2":
        raise ValueError("--parallel is for several ranks: say how many, as --ranks 64")


def quiet_libraries() -> None:
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    # torch logs a traceback of its own where an op fails on fake tensors.
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it remarks on each product that it casts
