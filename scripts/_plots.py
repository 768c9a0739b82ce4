"""Pictures of stored results. They know which results they were drawn from, so that a stale one is noticed."""

from __future__ import annotations

import hashlib
import json
import statistics
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "recipes"))

from _pictures import COLOURS, new_picture, save_picture

_COLOURS_OF_RULES = ("#bf616a", *COLOURS[1:], "#88c0d0")
_COLOUR_OF_RUN = {
    "fp32": "#4c566a",
    "hf_mp fp16": "#d08770",
    "hf_mp fp16-lean": "#bf616a",
    "hf_mp bf16": "#8fae6e",
    "hf_mp bf16-lean": "#b48ead",
    "torch.autocast bf16": "#5e81ac",
}
_DRAWN_FROM = "Source"  # a keyword that PNG knows


def draw_losses(result: Mapping[str, Any]) -> Any:
    """Training losses over the steps, and how far they are from those of ``fp32``: of compare_precisions.json."""
    figure, (top, bottom) = new_picture(2, 1, figsize=(8, 6.5), sharex=True, height_ratios=(3, 1))
    reference = result["fp32"]["losses"]
    for name, curve in result.items():
        colour = _COLOUR_OF_RUN[name]
        top.plot(curve["steps"], curve["losses"], label=f"{name}: {curve['eval_loss']:.4f} held out", color=colour)
        difference = [100 * (ours / theirs - 1) for ours, theirs in zip(curve["losses"], reference, strict=True)]
        bottom.plot(curve["steps"], difference, color=colour)
    top.set(ylabel="training loss")
    top.legend(frameon=False)
    bottom.set(ylabel="off FP32, %", xlabel="step")
    return figure


def draw_scales(result: Mapping[str, Any]) -> Any:
    """Loss scales over the steps, with a cross at each skipped one: of compare_scalers.json."""
    figure, axes = new_picture(figsize=(8, 4))
    for (name, found), colour in zip(result.items(), COLOURS, strict=False):
        changes, skipped_at = found["scale_changes"], found["skipped_at"]
        steps, scales = zip(*changes, (found["steps"], changes[-1][1]), strict=True)
        label = f"{name}: {len(skipped_at)} of {found['steps']:,} steps skipped"
        axes.step(steps, scales, where="post", color=colour, label=label)
        used = [[scale for step, scale in changes if step <= skip][-1] for skip in skipped_at]
        axes.plot(skipped_at, used, "x", color=colour)
    axes.set_yscale("log", base=2)
    axes.set(ylabel="loss scale", xlabel="step")
    figure.legend(loc="outside upper center", ncols=2, frameon=False)
    return figure


def draw_traces(result: Mapping[str, Any]) -> Any:
    """Skipped steps and underflow of every rule in each family, and what the best constants reach with hindsight.

    Of compare_scaler_traces.json. A rule is first on both counts in a family if nothing lies left of it or below it.
    """
    families = result["families"]
    figure, grid = new_picture(-(-len(families) // 3), 3, figsize=(11, 7), squeeze=False)
    for axes, (family, found) in zip(grid.flat, families.items(), strict=False):
        for number, (name, row) in enumerate(found["contenders"].items()):
            style = {"s": 130, "marker": "*", "zorder": 3} if number == 0 else {"s": 30}
            avoidable = row["skipped_steps"] - found["unavoidable_skips"]
            axes.scatter(avoidable, 100 * row["underflow"], color=_COLOURS_OF_RULES[number], label=name, **style)
        if found["best_constants"]:
            skips, underflow = zip(*found["best_constants"], strict=True)
            left = [skip - found["unavoidable_skips"] for skip in skips]
            label = "best constant scales, with hindsight"
            axes.plot(left, [100 * share for share in underflow], ":", color=COLOURS[2], label=label)
        axes.set_xscale("symlog", linthresh=10)
        axes.set(yscale="log", xlim=(-0.5, 150), title=family)
        axes.set(xlabel="avoidable skipped steps a run", ylabel="underflow, %")
    handles, labels = grid.flat[1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    return figure


def draw_steps(result: Mapping[str, Any]) -> Any:
    """Seconds of a step with their spread, next to the floor, and peak memory: of bench_step.json.

    Contenders that take more than four times the median of all are left out: they would hide the others.
    """
    timed = {name: row for name, row in result["contenders"].items() if "median_seconds" in row}
    most = 4 * statistics.median_high(row["median_seconds"] for row in timed.values())
    shown = {name: row for name, row in reversed(timed.items()) if row["median_seconds"] <= most}
    names, rows = list(shown), list(shown.values())
    colours = [COLOURS[not name.startswith("hf_mp")] for name in names]  # ours, others
    figure, (left, right) = new_picture(
        1, 2, figsize=(8, 0.9 + 0.32 * len(names)), sharey=True, width_ratios=(3, 2)
    )  # fmt: skip
    spreads = [row["spread_seconds"] / 2 for row in rows]
    error = {"ecolor": COLOURS[2], "elinewidth": 1}
    left.barh(names, [row["median_seconds"] for row in rows], xerr=spreads, color=colours, error_kw=error)
    left.plot([row["floor_seconds"] for row in rows], names, "|", color="black", markersize=11, label="floor")
    left.legend(frameon=False, loc="lower right")
    left.set(xlabel="seconds a step")
    right.barh(names, [(row["peak_bytes"] or 0) / 2**20 for row in rows], color=colours)
    right.set(xlabel="peak of all tensors, MiB")
    return figure


PICTURES = {
    "bench_step": draw_steps,
    "compare_precisions": draw_losses,
    "compare_scalers": draw_scales,
    "compare_scaler_traces": draw_traces,
}


def draw(name: str, result: Mapping[str, Any], path: Path) -> None:
    """The picture of a result, as a PNG that says which result it is of."""
    save_picture(PICTURES[name](result), path, {_DRAWN_FROM: digest(result)})


def drawn_from(path: Path) -> str | None:
    """Which results a picture says that it was drawn from, as :func:`digest` gives them; None where it says nothing."""
    from PIL import Image

    with Image.open(path) as picture:
        return picture.info.get(_DRAWN_FROM)


def digest(result: Mapping[str, Any]) -> str:
    """A short name for what a result holds."""
    return hashlib.sha256(json.dumps(result, sort_keys=True).encode()).hexdigest()[:16]
