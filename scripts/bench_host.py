"""What a step costs the host: GPT-2 of 12 layers so narrow that its kernels take next to no time.

    python scripts/bench_host.py                 # FP32, torch.autocast with GradScaler, hf_mp, in turns
    python scripts/bench_host.py --group-elements 1  # an inward border for each weight

Times are ratios to torch.autocast with GradScaler in the same run. It also counts, for one step: Python
calls, autograd nodes written in Python, kernels, and reads of a device value, which do not depend on the machine.
Stores ``scripts/results/bench_host.json``, or under another ``--name``.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any
from unittest import mock

import torch
import typer
from torch.autograd.function import BackwardCFunction
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.utils import logging

import hf_mp
from _benchmarks import number, show_table
from _results import RESULTS, median_and_spread, save_result
from hf_mp.policy import mixed_presets
from hf_mp.step.forward import _Passage
from hf_mp.step.gradients import GradientCheck
from hf_mp.step.mixed_precision import MixedPrecision
from hf_mp.weights import fused_adamw
from hf_mp.weights.layout import WeightLayout

BARE = "fp32, bare function mode"
FLOOR = "torch.autocast bf16, GradScaler, bare function mode"
UNSCALED = "torch.autocast bf16"
PEER = "torch.autocast bf16, GradScaler"
# Scaled in BF16 as well: products of FP16 cost some CPUs more than the host does.
OURS = {
    **{f"hf_mp {preset}": preset for preset in mixed_presets()},
    "hf_mp bf16, loss scaled": "params=fp32,compute=bf16,loss_scale=headroom",
}
CONTENDERS = ("fp32", BARE, UNSCALED, PEER, FLOOR, *OURS)
PARTS = ("forward", "backward", "clipping", "update", "step")


class BareMode(TorchFunctionMode):
    """Sees every torch call and does nothing: with torch's own casts, the floor of an autocast written in Python."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


# What a step of ours does that torch's has not, or does elsewhere.
PLACES: dict[str, tuple[Any, str]] = {
    "weights brought in": (MixedPrecision, "begin_forward"),
    "outputs brought out": (_Passage, "bring_out"),
    "gradients measured": (GradientCheck, "measure"),
    "verdict": (MixedPrecision, "verdict"),
    "lean kernels": (fused_adamw, "adamw_"),
    "weights rounded": (WeightLayout, "updated"),
    "step finished": (MixedPrecision, "finish_step"),
}

Step = Callable[[], tuple[float, ...]]


def make_step(contender: str, layers: int, width: int, tokens: int, mode: BareMode | None = None) -> Step:
    """One training step, its forward in ``mode``; returns the times at its begin and after its parts."""
    torch.manual_seed(0)
    config = GPT2Config(n_layer=layers, n_embd=width, n_head=4, vocab_size=512, n_positions=tokens, use_cache=False,
                        bos_token_id=0, eos_token_id=0)  # fmt: skip
    model = GPT2LMHeadModel(config).train()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    ids = torch.randint(0, 512, (1, tokens))
    scaler = torch.amp.GradScaler("cpu", enabled=contender in (PEER, FLOOR))
    if contender in OURS:
        model, optimizer = hf_mp.prepare(model, optimizer, OURS[contender])
    is_cast = contender in (UNSCALED, PEER, FLOOR)
    casts: Any = torch.autocast("cpu", torch.bfloat16) if is_cast else contextlib.nullcontext()
    if mode is None and contender in (BARE, FLOOR):
        mode = BareMode()

    def step() -> tuple[float, ...]:
        begin = time.perf_counter()
        with casts, mode or contextlib.nullcontext():
            loss = model(input_ids=ids, labels=ids).loss
        forward = time.perf_counter()
        scaler.scale(loss).backward()
        backward = time.perf_counter()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        clipping = time.perf_counter()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return begin, forward, backward, clipping, time.perf_counter()

    return step


class _Calls(BareMode):
    """Counts the torch calls that a forward makes in Python."""

    calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return super().__torch_function__(func, types, args, kwargs)


_UNDISPATCHED = ("tolist", "numpy")  # reads that no dispatcher hears of


class _Kernels(TorchDispatchMode):
    """Counts the operators that compute something, and those that hand a value to the host."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels = self.reads = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.reads += func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default)
        self.kernels += not func.is_view
        name = func.overloadpacket.__name__
        if name.startswith("_foreach_") and name.endswith("_"):  # under a mode, torch forgets to
            for tensor in args[0]:
                torch.autograd.graph.increment_version(tensor)
        return func(*args, **(kwargs or {}))


def count(step: Step) -> dict[str, int]:
    """What one step of a model that has taken some counts."""
    for _ in range(3):
        step()
    with (kernels := _Kernels()):
        step()
    calls = nodes = reads = 0

    def profile(frame: Any, event: str, arg: Any) -> None:
        nonlocal calls, nodes, reads
        calls += event == "call"
        reads += event == "c_call" and arg.__name__ in _UNDISPATCHED and isinstance(arg.__self__, torch.Tensor)
        nodes += event == "call" and frame.f_code is BackwardCFunction.apply.__code__

    gc.collect()  # whose callbacks would be counted
    gc.disable()
    sys.setprofile(profile)
    try:
        step()
    finally:
        sys.setprofile(None)
        gc.enable()
    reads += kernels.reads
    return {"python_calls": calls, "python_nodes": nodes, "kernels": kernels.kernels, "host_reads": reads}


@contextlib.contextmanager
def timed(places: Mapping[str, tuple[Any, str]]) -> Iterator[dict[str, list[float]]]:
    """Seconds of every call of some functions, by the owner and the name of each."""
    found: dict[str, list[float]] = {place: [] for place in places}

    def timing(place: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            result = function(*args, **kwargs)
            found[place].append(time.perf_counter() - begin)
            return result

        return call

    with contextlib.ExitStack() as patches:
        for place, (owner, name) in places.items():
            patches.enter_context(mock.patch.object(owner, name, timing(place, getattr(owner, name))))
        yield found


def take_apart(contender: str, layers: int, width: int, tokens: int, rounds: int) -> dict[str, float]:
    """Seconds that a step of ours spends in its own parts, which torch's has not."""
    step = make_step(contender, layers, width, tokens)
    for _ in range(5):
        step()
    with timed(PLACES) as found:
        for _ in range(rounds):
            step()
    return {place: sum(seconds) / rounds for place, seconds in found.items()}


def main(
    layers: int = 12,
    width: int = 64,
    tokens: int = 16,
    rounds: Annotated[int, typer.Option(help="timed steps of each contender")] = 200,
    group_elements: Annotated[int, typer.Option(help="of weights that share an inward border; 0: the default")] = 0,
    name: str = "bench_host",
    output_dir: Path = RESULTS,
) -> None:
    """Time the parts of a step on one thread, and count; store medians, spreads and ratios to torch.autocast."""
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    if group_elements:
        from hf_mp.step import mixed_precision

        mixed_precision.GROUP_ELEMENTS = group_elements
    steps = {c: make_step(c, layers, width, tokens) for c in CONTENDERS}
    times: dict[str, dict[str, list[float]]] = {c: {part: [] for part in PARTS} for c in steps}
    for index in range(-5, rounds):
        for contender, step in steps.items():
            moments = step()
            if index >= 0:
                seconds = [end - begin for begin, end in itertools.pairwise(moments)]
                for part, value in zip(PARTS, [*seconds, moments[-1] - moments[0]], strict=True):
                    times[contender][part].append(value)
    rows = {
        c: {part: median_and_spread(found)._asdict() for part, found in parts.items()} for c, parts in times.items()
    }
    for parts in rows.values():
        for part, row in parts.items():
            row["ratio_to_torch_autocast"] = row["median_seconds"] / rows[PEER][part]["median_seconds"]
    counts = {c: count(step) for c, step in steps.items()}
    apart = {c: take_apart(c, layers, width, tokens, rounds) for c in OURS}
    make_step("fp32", layers, width, tokens, seen := _Calls())()
    workload = {"layers": layers, "width": width, "tokens": tokens, "threads": 1, "group_elements": group_elements,
                "parameters": 4 + 12 * layers, "torch_calls": seen.calls}  # fmt: skip
    for parts in rows.values():  # above FP32
        above = {part: row["median_seconds"] - rows["fp32"][part]["median_seconds"] for part, row in parts.items()}
        parts["forward"]["seconds_per_torch_call"] = above["forward"] / seen.calls
        parts["step"]["seconds_per_parameter"] = (above["step"] - above["forward"]) / workload["parameters"]
    result = {"workload": workload, "contenders": rows, "counts": counts, "apart": apart}
    path = save_result(name, result, directory=output_dir)
    show_table(
        "Milliseconds of the host (times torch.autocast)",
        ("contender", *PARTS),
        [(contender, *map(_cell, parts.values())) for contender, parts in rows.items()],
    )
    show_table(
        "One step",
        ("contender", "Python calls", "nodes in Python", "kernels", "reads by the host"),
        [(contender, *map(str, found.values())) for contender, found in counts.items()],
    )
    show_table(
        "Milliseconds of ours, in parts that torch's step has not",
        ("contender", *PLACES),
        [(contender, *(f"{1e3 * seconds:.2f}" for seconds in found.values())) for contender, found in apart.items()],
    )
    print(f"stored in {path.name}")


def _cell(row: dict[str, float]) -> str:
    return f"{1e3 * row['median_seconds']:.2f} ({number(row['ratio_to_torch_autocast'])})"


if __name__ == "__main__":
    typer.run(main)
