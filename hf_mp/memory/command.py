"""``hf-mp memory``, from validated arguments to the text that it prints."""

from __future__ import annotations

import json
import logging
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import typer
from rich.console import Console
from transformers.utils import logging as transformers_logging

from hf_mp.memory.html_page import check_writable, write_whole
from hf_mp.memory.page import render_page
from hf_mp.memory.parallel import Bandwidth
from hf_mp.memory.precisions import SHOWN_PRESETS, TRAINING_PRESETS, parse_preset
from hf_mp.memory.report import MemoryReport, gather_report
from hf_mp.memory.report import as_json as report_as_json
from hf_mp.memory.sizes import parse_size
from hf_mp.memory.tables import render
from hf_mp.policy import spell


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
    if html is not None:
        if as_json:
            raise ValueError("--json and --html are both given: choose one, or run twice")
        # Minutes of measuring must not end at a folder that does not exist.
        check_writable(html)
    if settings["ranks"] == 1 and (bandwidth, settings["parallel"]) != (None, "fsdp2"):
        raise ValueError("--bandwidth and --parallel are for several ranks: say how many, as --ranks 64")
    # Their remarks would stand between the tables.
    quiet_libraries()
    with _told_progress() as tell:
        report = gather_report(
            model,
            config_only=config_only,
            train=any((train, gpu, precision, settings["ranks"] > 1)),
            measure=measure,
            gpu_bytes=None if gpu is None else parse_size(gpu),
            bandwidth=None if bandwidth is None else Bandwidth.parse(bandwidth),
            presets=_presets(precision),
            progress=tell,
            device=device or _default_device(measure),
            **settings,
        )
    if as_json:
        return json.dumps(report_as_json(report), indent=2, allow_nan=False) + "\n"
    lines = _printed(report, others=precision is None)
    if html is not None:
        write_whole(html, render_page(report))
        lines.append(f"{html} is written: {html.stat().st_size / 1024:,.0f} KiB, open it in a browser")
    return "\n".join([*lines, ""])


def _default_device(measure: bool) -> str:
    """What is predicted for: a GPU, except where steps are also taken and there is none."""
    return "cpu" if measure and not torch.cuda.is_available() else "cuda"


def _printed(report: MemoryReport, *, others: bool) -> list[str]:
    """The lines of the tables, and where ``others`` is true those that name the presets that were not asked for."""
    console = Console()
    with console.capture() as capture:
        console.print(render(report, console.width))
    lines = [line.rstrip() for line in capture.get().splitlines()]
    if others and report.training:
        left = [name for name in TRAINING_PRESETS if name not in SHOWN_PRESETS]
        sentence = f"{len(left)} more with --precision all, or one by its name: {', '.join(left)}"
        lines += ["", *textwrap.wrap(sentence, console.width, break_on_hyphens=False)]
    return lines


def _presets(precision: Sequence[str] | None) -> tuple[str, ...]:
    """The presets that ``--precision`` names, in order."""
    if precision is None:
        return SHOWN_PRESETS
    if "all" in precision:
        return tuple(TRAINING_PRESETS)
    for preset in precision:
        parse_preset(preset)
    return tuple(map(spell, precision))


def quiet_libraries() -> None:
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    # torch logs a traceback of its own where an op fails on fake tensors.
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it remarks on each product that it casts


@contextmanager
def _told_progress() -> Iterator[Callable[[str], None]]:
    """Show the current step on stderr: on a line that disappears, or, where that is no terminal, on one for each."""
    console = Console(stderr=True)
    # A file or a pipe would get each state of a line that is redrawn.
    if not console.is_terminal:
        yield lambda step: typer.echo(f"hf-mp memory: {step} ...", err=True) if "training" in step else None
        return
    with console.status("reading the configuration ...") as status:
        yield lambda step: status.update(f"{step} ...")
