"""Draws the two pictures of the README from the stored results, into docs/assets/.

    python scripts/make_pictures.py

One file serves light and dark pages: its colours are variables of CSS. Its description is the text that the README has
for readers who do not see it (the region ``pictures`` of ``tables.toml``), which a test compares.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from io import StringIO
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from _results import RESULTS, ROOT
from _tables import Regions

ASSETS = ROOT / "docs" / "assets"
# What matplotlib draws in, and the same on a dark page.
PAGE, INK, NOTE, OURS, THEIRS, FLOOR = "#ffffff", "#1f2430", "#5a6275", "#1769c2", "#b9bfca", "#e08a1e"
DARK = {PAGE: "#1b1e26", INK: "#e8eaf0", NOTE: "#a4acbd", OURS: "#5aa2f0", THEIRS: "#565e6e", FLOOR: "#eda445"}
STYLE: Any = {
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "hf_mp",  # the same identifiers in each run
    "font.size": 9,
    "figure.facecolor": PAGE,
    "axes.facecolor": PAGE,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlecolor": INK,
    "axes.titlelocation": "left",
    "axes.labelcolor": NOTE,
    "axes.edgecolor": THEIRS,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "text.color": INK,
    "xtick.color": NOTE,
    "ytick.color": NOTE,
}

MODELS = {"GPT-2 124M": "h200/bench_step_gpt2", "GPT-2 774M": "h200/bench_step_gpt2_large"}
BARS = {
    "Trainer fp16=True": "fp16=True",
    "torch.autocast bf16": "torch.autocast, BF16",
    "hf_mp bf16": "hf_mp bf16",
    "MixedPrecisionTrainer fp16": "hf_mp fp16",
    "MixedPrecisionTrainer fp16-lean": "hf_mp fp16-lean",
}
STOCK, FP32 = "loaded in BF16, stock Trainer", "loaded in FP32, stock Trainer"
CALLBACK = 'loaded in BF16, MixedPrecisionCallback("bf16")'


def draw_memory(records: Mapping[str, Any]) -> None:
    """Peaks of a step by precision, a group of bars for each model, each with a scale of its own."""
    found = {
        model: {label: row[name]["peak_bytes"] / 2**30 for name, label in BARS.items() if name in row}
        for model, row in ((model, records[name]["result"]["contenders"]) for model, name in MODELS.items())
    }
    heights = [len(bars) for bars in found.values()]
    figure, axes = plt.subplots(len(found), height_ratios=heights, figsize=(4.2, 3.15), layout="constrained")
    figure.suptitle("Peak memory of a step, GiB (H200)", x=0.01, ha="left", size=10, weight="bold")
    for axis, (model, bars) in zip(axes, found.items(), strict=True):
        colours = [OURS if label.startswith("hf_mp") else THEIRS for label in bars]
        drawn = axis.barh(list(bars), list(bars.values()), color=colours, height=0.72)
        axis.bar_label(drawn, fmt="%.1f", padding=3, color=INK)
        axis.set_title(model, size=9, weight="normal", color=NOTE)
        axis.invert_yaxis()
        axis.tick_params(length=0, labelcolor=INK)
        axis.spines[:].set_visible(False)
        axis.set_xticks([])
        axis.set_xlim(0, 1.12 * max(bars.values()))


def draw_losses(records: Mapping[str, Any]) -> None:
    """Held-out losses of a fine-tuning, ours over those of FP32."""
    rows = records["compare_loading"]["result"]["contenders"]
    _, axis = plt.subplots(figsize=(4.2, 3.15), layout="constrained")
    axis.set_title("Held-out loss of a BF16 checkpoint (CPU)")
    stock, floor, ours = (rows[name] for name in (STOCK, FP32, CALLBACK))
    axis.plot(stock["steps"], stock["eval_losses"], color=FLOOR, linewidth=2)
    axis.plot(floor["steps"], floor["eval_losses"], color=THEIRS, linewidth=6, solid_capstyle="round")
    axis.plot(ours["steps"], ours["eval_losses"], color=OURS, linewidth=1.6)
    _label(axis, stock, "stock Trainer", FLOOR, above=7)
    _label(axis, ours, "hf_mp, on FP32 (grey)", OURS, above=30)  # clear of the curve
    axis.set_xlabel("step")
    axis.set_xlim(0, stock["steps"][-1])


def _label(axis: Axes, row: Mapping[str, Any], text: str, colour: str, above: int) -> None:
    place = (row["steps"][-1], row["eval_losses"][-1])
    axis.annotate(f"{text}: {place[1]:.2f}", place, (0, above), textcoords="offset points", color=colour, ha="right")


PICTURES: dict[str, Callable[[Mapping[str, Any]], None]] = {"memory": draw_memory, "losses": draw_losses}


def descriptions(regions: Regions) -> dict[str, str]:
    """What the README says of each picture, by name."""
    found = re.findall(r"!\[([^\]]*)\]\(docs/assets/(\w+)\.svg\)", regions("pictures"))
    return {name: " ".join(text.split()) for text, name in found}


def picture(name: str, regions: Regions) -> str:
    """One as SVG."""
    with plt.rc_context(STYLE):
        PICTURES[name](regions.records)
        file = StringIO()
        metadata = {"Date": None, "Creator": None, "Description": descriptions(regions)[name]}
        plt.savefig(file, format="svg", metadata=metadata)
        plt.close()
    text = file.getvalue()
    for number, colour in enumerate(DARK):
        text = text.replace(colour, f"var(--c{number})")
    light, dark = ("".join(f"--c{n}:{c};" for n, c in enumerate(colours)) for colours in (DARK, DARK.values()))
    style = f":root{{{light}}}@media(prefers-color-scheme:dark){{:root{{{dark}}}}}"
    return text.replace('<style type="text/css">', f'<style type="text/css">{style}', 1)


def main(directory: Path = ASSETS) -> None:
    """Draw both."""
    regions = Regions(RESULTS)
    for name in PICTURES:
        (directory / f"{name}.svg").write_text(picture(name, regions), encoding="utf-8")


if __name__ == "__main__":
    main()
