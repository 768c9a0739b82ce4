"""``hf-mp memory``, from validated arguments to the text that it prints."""

from __future__ import annotations

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
from hf_mp.memory.page import render_page
from hf_mp.memory.parallel import Bandwidth
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
    """Gather the report and return the text to print; with ``html``, also write the page."""
    if as_json and html is not None:
        raise ValueError("--json and --html are both given: choose one, or run twice")
    if html is not None:
        # Minutes of measuring must not end at a folder that does not exist.
        check_writable(html)
    if settings["ranks"] == 1 and (bandwidth, settings["parallel"]) != (None, "fsdp2"):
        raise ValueError("--bandwidth and --parallel are for several ranks: say how many, as --ranks 64")
    # Their remarks would stand between the tables.
    quiet_libraries()
    report = gather_report(
        model,
        config_only=config_only,
        train=any((train, gpu, precision, settings["ranks"] > 1)),
        measure=measure,
        gpu_bytes=None if gpu is None else parse_size(gpu),
        bandwidth=None if bandwidth is None else Bandwidth.parse(bandwidth),
        presets=precision or SHOWN_PRESETS,
        # Lines, not one that is redrawn: a file or a pipe would get each state of it.
        progress=lambda step: typer.echo(f"hf-mp memory: {step} ...", err=True),
        # For a GPU, except where steps are also taken and there is none.
        device=device or ("cpu" if measure and not torch.cuda.is_available() else "cuda"),
        **settings,
    )
    if as_json:
        return json.dumps(report_as_json(report), indent=2, allow_nan=False) + "\n"
    console = Console()
    with console.capture() as capture:
        console.print(render(report, console.width))
    lines = [line.rstrip() for line in capture.get().splitlines()]
    if html is not None:
        html.write_text(render_page(report), encoding="utf-8")
        lines.append(f"{html} is written: {html.stat().st_size / 1024:,.0f} KiB, open it in a browser")
    return "\n".join([*lines, ""])


def quiet_libraries() -> None:
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    # torch logs a traceback of its own where an op fails on fake tensors.
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it remarks on each product that it casts
