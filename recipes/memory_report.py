"""What GPT-2 takes in memory, loaded and fine-tuned: a page for the browser and a picture.

    python recipes/memory_report.py                              # GPT-2 from its configuration: nothing is downloaded
    python recipes/memory_report.py --model my/directory --gpu 16GiB
    python recipes/memory_report.py --model my/directory --load  # count real loads in six precisions
    python recipes/memory_report.py --batch_size 2 --seq_len 256 --measure   # and take the steps on this machine

The same as ``hf-mp memory``, through the API.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import matplotlib
import torch
from rich.console import Console

from hf_mp.memory.command import quiet_libraries
from hf_mp.memory.html_page import check_writable, write_whole
from hf_mp.memory.ledger import Category
from hf_mp.memory.page import render_page
from hf_mp.memory.precisions import TRAINING_PRESETS
from hf_mp.memory.report import MemoryReport, gather_report
from hf_mp.memory.sizes import GIB, parse_size
from hf_mp.memory.tables import render

PRESETS = ("fp32", "fp16", "bf16", "fp16-lean", "trainer-fp16", "fp16-lean-adamw8bit", "int8-lora")
COLOURS = ("#3b5b92", "#6f9bd8", "#8b95a5", "#c98a1b", "#7a5195", "#3f8f6b", "#c2577a", "#d9a08b", "#a7b0bd")


def main(argv: Sequence[str] | None = None) -> None:
    """Gather the report, print it, write the page and the picture."""
    args = parse_arguments(argv)
    output_dir = Path(args.output_dir)
    quiet_libraries()
    try:
        check_writable(
            next(path for path in (output_dir, *output_dir.absolute().parents) if path.exists()) / "memory.html"
        )
        report = gather_report(
            args.model,
            config_only=not args.load,
            train=True,
            measure=args.measure,
            gpu_bytes=parse_size(args.gpu),
            presets=args.precision or PRESETS,
            progress=lambda step: print(f"{step} ...", file=sys.stderr),
            batch_size=args.batch_size,
            seq_len=args.seq_len,
            gradient_checkpointing=args.gradient_checkpointing,
            device=args.device or ("cpu" if args.measure and not torch.cuda.is_available() else "cuda"),
        )
    except (ValueError, ImportError) as error:
        sys.exit(f"memory_report.py: error: {error}")
    console = Console()
    console.print(render(report, console.width))
    page = render_page(report)
    output_dir.mkdir(parents=True, exist_ok=True)
    write_whole(output_dir / "memory.html", page)
    draw(report, output_dir / "memory.png")
    print(f"{output_dir / 'memory.html'} and {output_dir / 'memory.png'} are written")


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="gpt2", help="directory, config.json, name; default: gpt2, built in")
    parser.add_argument("--load", action="store_true", help="load the weights instead of counting from the config")
    parser.add_argument("--measure", action="store_true", help="take each training step on this machine as well")
    parser.add_argument("--precision", action="append", choices=TRAINING_PRESETS, help="may be given several times")
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--seq_len", type=int)
    parser.add_argument("--gradient_checkpointing", action="store_true")
    parser.add_argument("--gpu", default="24GiB", help="memory of the GPU in question; default: 24GiB")
    parser.add_argument("--device", choices=("cuda", "cpu"))
    parser.add_argument("--output_dir", default="outputs/memory_report")
    return parser.parse_args(argv)


def draw(report: MemoryReport, path: Path) -> None:
    """Peaks by category above, the timeline of one step of the second way of training below."""
    matplotlib.use("Agg")
    from matplotlib import pyplot

    colours = dict(zip(Category, COLOURS, strict=True))
    estimates = {TRAINING_PRESETS[name].label: row.estimate for name, row in report.training.items()}
    figure, (bars, areas) = pyplot.subplots(2, 1, figsize=(9, 8), layout="constrained")
    left = dict.fromkeys(estimates, 0.0)
    for category in Category:
        sizes = [estimate.bytes_by_category[category] / GIB for estimate in estimates.values()]
        if any(sizes):
            bars.barh(list(estimates), sizes, left=list(left.values()), color=colours[category], label=category.value)
        left = {name: start + size for (name, start), size in zip(left.items(), sizes, strict=True)}
    if report.gpu_bytes is not None:
        bars.axvline(report.gpu_bytes / GIB, color="#b3261e", linestyle="--", label="the GPU")
    bars.invert_yaxis()
    bars.set_xlabel("GiB at the peak of one training step")
    bars.legend(frameon=False, fontsize="small")
    label, shown = list(estimates.items())[min(1, len(estimates) - 1)]
    positions = [moment.position for moment in shown.timeline]
    stacks = [[moment.bytes_by_category[category] / GIB for moment in shown.timeline] for category in Category]
    areas.stackplot(positions, stacks, colors=COLOURS)
    areas.set_title(f"{label}: one step, storage by storage")
    areas.set_ylabel("GiB")
    areas.set_xticks([])
    for axes in (bars, areas):
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"{report.model}: {report.architecture}, {report.parameters:,} parameters")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


if __name__ == "__main__":
    main()
