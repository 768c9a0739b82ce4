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
from hf_mp.memory.report import as_json as report_as_json
from hf_mp.memory.report import gather_report
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
    if as_json and html is not None:
        raise ValueError("--json and --html are both given: choose one, or run twice")
    if html is not None:
        check_writable(html)
    gpu_bytes = None if gpu is None else parse_size(gpu)
    rates = None if bandwidth is None else Bandwidth.parse(bandwidth)
    if settings["ranks"] == 1 and (rates is not None or settings["parallel"] != "fsdp2"):
        raise ValueError("--bandwidth and --parallel are for several ranks: say how many, as --ranks 64")
    presets = _presets(precision)
    train = train or gpu is not None or precision is not None or settings["ranks"] > 1
    quiet_libraries()
    with _told_progress() as tell:
        report = gather_report(
            model,
            config_only=config_only,
            train=train,
            measure=measure,
            gpu_bytes=gpu_bytes,
            bandwidth=rates,
            presets=presets,
            progress=tell,
            device=device or ("cuda" if not measure or torch.cuda.is_available() else "cpu"),
            **settings,
        )
    if as_json:
        return json.dumps(report_as_json(report), indent=2, allow_nan=False) + "\n"
    console = Console()
    with console.capture() as capture:
        console.print(render(report, console.width))
    lines = capture.get().splitlines()
    if precision is None and (train or measure):
        others = [name for name in TRAINING_PRESETS if name not in presets]
        sentence = f"{len(others)} more with --precision all, or one by its name: {', '.join(others)}"
        lines += ["", *textwrap.wrap(sentence, console.width, break_on_hyphens=False)]
    if html is not None:
        write_whole(html, render_page(report))
        lines.append(f"{html} is written: {html.stat().st_size / 1024:,.0f} KiB, open it in a browser")
    return "".join(f"{line.rstrip()}\n" for line in lines)


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
    if not console.is_terminal:
        yield lambda step: typer.echo(f"hf-mp memory: {step} ...", err=True) if "training" in step else None
        return
    with console.status("reading the configuration ...") as status:
        yield lambda step: status.update(f"{step} ...")
