"""What a step costs the host: GPT-2 of 12 layers so narrow that its kernels take next to no time.

    python scripts/bench.py host                     # FP32, torch.autocast with GradScaler, hf_mp, in turns
    python scripts/bench.py host --width 16 --tokens 4 --with-products --name bench_host_narrow    # on any CPU

Times are ratios to torch.autocast with GradScaler in the same run. It also counts, for one step: Python
calls, autograd nodes written in Python, kernels, and reads of a device value, which do not depend on the machine.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Mapping
from typing import Annotated, Any
from unittest.mock import patch

import torch
import typer
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.utils._python_dispatch import TorchDispatchMode

from _benchmarks import Workload
from _contenders import BARE, LOSS_SCALED, PARTS, BareMode, Parts, Step
from _contenders import make_step as make_loop
from _results import rows_of
from hf_mp.casting.cpu.upcast import CPU_PRODUCTS
from hf_mp.policy import mixed_presets

PEER = "torch.autocast bf16, GradScaler"
# Scaled in BF16 as well: products of FP16 cost some CPUs more than the host does.
OURS = (*(f"hf_mp {preset}" for preset in mixed_presets()), f"hf_mp bf16, {LOSS_SCALED}")
CONTENDERS = ("fp32", f"fp32, {BARE}", "torch.autocast bf16", PEER, f"{PEER}, {BARE}", *OURS)


def make_step(contender: str, layers: int, width: int, tokens: int, parts: Parts | None = None) -> Step:
    """One training step; ``parts`` gets the seconds of its parts."""
    model, inputs = model_and_inputs(layers, width, tokens)
    return make_loop(contender, model, inputs, parts=parts)


def model_and_inputs(layers: int, width: int, tokens: int) -> tuple[Any, dict[str, Tensor]]:
    """What is trained, and on what."""
    workload = Workload(layers, width, 4, 512, 1, tokens, dropout=0.1, positions=tokens)
    ids = workload.token_ids()
    return workload.model(), {"input_ids": ids, "labels": ids}


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


def rows_by_part(
    moments: Mapping[str, Parts], peer: str | Mapping[str, str] = PEER
) -> dict[str, dict[str, dict[str, Any]]]:
    """A row for each contender and part of its steps, and for the whole; ``peer`` as in :func:`rows_of`."""
    seconds = {
        contender: dict(zip((*PARTS, "step"), (*zip(*steps, strict=True), list(map(sum, steps))), strict=True))
        for contender, steps in moments.items()
    }
    found: dict[str, dict[str, dict[str, Any]]] = {contender: {} for contender in moments}
    for part in (*PARTS, "step"):
        of_part = {contender: parts[part] for contender, parts in seconds.items()}
        for contender, row in rows_of(of_part, ratio_to_torch_autocast=peer).items():
            found[contender][part] = row
    return found


def measure(
    layers: int = 12,
    width: int = 64,
    tokens: int = 16,
    rounds: Annotated[int, typer.Option(help="timed steps of each contender")] = 200,
    with_products: Annotated[bool, typer.Option(help="take this CPU for one that multiplies in both dtypes")] = False,
) -> dict[str, Any]:
    """Time the parts of a step on one thread, and count: medians, spreads and ratios to torch.autocast.

    ``with_products`` is for a CPU that has no 16-bit products, and a model so narrow that these take it little time.
    """
    with patch.dict(CPU_PRODUCTS, dict.fromkeys(CPU_PRODUCTS, True) if with_products else {}):
        return _measured(layers, width, tokens, rounds)


def _measured(layers: int, width: int, tokens: int, rounds: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    moments: dict[str, Parts] = {contender: [] for contender in CONTENDERS}
    steps = {c: make_step(c, layers, width, tokens, parts=moments[c]) for c in CONTENDERS}
    for _ in range(5 + rounds):
        for step in steps.values():
            step()
    rows = rows_by_part({contender: found[5:] for contender, found in moments.items()})
    model, inputs = model_and_inputs(layers, width, tokens)
    with (seen := _Calls()):
        model(**inputs)
    parameters = 4 + 12 * layers
    for parts in rows.values():
        above = {part: row["median_seconds"] - rows["fp32"][part]["median_seconds"] for part, row in parts.items()}
        parts["forward"]["seconds_per_torch_call"] = above["forward"] / seen.calls
        parts["step"]["seconds_per_parameter"] = (above["step"] - above["forward"]) / parameters
    return {
        "workload": {"layers": layers, "width": width, "tokens": tokens, "threads": 1,
                     "parameters": parameters, "torch_calls": seen.calls},
        "contenders": rows,
        "counts": {c: count(step) for c, step in steps.items()},
    }  # fmt: skip
