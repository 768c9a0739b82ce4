"""What autocast costs: an intercepted call, casts of weights, a training forward and backward.

    python scripts/bench.py autocast                     # bfloat16: ours in turns with torch.autocast
    python scripts/bench.py autocast --layers 2 --width 64 --vocab 500 --seq 32 --rounds 2      # a quick look

The floor of forward and backward is their matrix products at the best rate that this device reached. What a token of
``generate()`` takes, ``generate`` measures.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any

import torch
import typer
from accelerate.utils import convert_outputs_to_fp32
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GPT2LMHeadModel

from _benchmarks import DEFAULT_DEVICE, DTYPES, DeviceRates, Workload, rounded_copies
from _contenders import BareMode, Step
from _results import alternate, median_and_spread, rows_of
from hf_mp import MixedPrecision, autocast
from hf_mp.dtypes import compute_dtype

Rows = dict[str, dict[str, Any]]

PEER = "torch.autocast"
OURS, OURS_CPU_TABLES = "hf_mp", "hf_mp, cpu tables"
# The Trainer's bf16=True enters autocast anew for each forward, which then casts all weights again, and gives FP32
# outputs as ours does; a model that is bfloat16 throughout shows how far any autocast could get.
PER_FORWARD, WHOLE = "accelerate's (Trainer bf16=True)", "the whole model in 16 bits"
CONTENDERS = (PEER, OURS, OURS_CPU_TABLES, PER_FORWARD, WHOLE)


EMPTY_MODE, DISABLED = "a mode that does nothing", "hf_mp, enabled=False"


def call_overhead(dtype: torch.dtype, device: str, calls: int, rounds: int) -> Rows:
    """Microseconds that an autocast adds to calls that it leaves alone, and to some that it looks up.

    A torch function mode that does nothing is the floor of one in Python.
    """
    ids = torch.arange(4, device=device)
    x = torch.ones(2, 2, dtype=dtype, device=device)
    wide, weight = torch.ones(16, 64, device=device), torch.ones(64, device=device)
    narrow, matrix = wide.to(dtype), torch.ones(64, 64, dtype=dtype, device=device)
    cases: dict[str, Callable[[], Any]] = {
        "unlisted op (integer add)": lambda: ids + 1,
        "property (shape)": lambda: ids.shape,
        "lower-precision op (mm, nothing to cast)": lambda: torch.mm(x, x),
        "`F.linear` of 16 bits": lambda: F.linear(narrow, matrix, matrix[0]),
        "`F.softmax` of FP32": lambda: F.softmax(wide, -1),
        "`F.softmax` of 16 bits": lambda: F.softmax(narrow, -1),
        "`F.layer_norm` of FP32": lambda: F.layer_norm(wide, (64,), weight, weight),
        "`F.layer_norm` of 16 bits": lambda: F.layer_norm(narrow, (64,), weight, weight),
        "`F.gelu` of 16 bits": lambda: F.gelu(narrow),
        "`F.cross_entropy` of FP32": lambda: F.cross_entropy(wide[:4], ids),
    }

    def loop(call: Callable[[], Any], context: Callable[[], Any]) -> Step:
        def run() -> None:
            with context():
                for _ in range(calls):
                    call()

        return run

    contexts: dict[str, Callable[[], Any]] = {
        "plain": contextlib.nullcontext,
        OURS: lambda: autocast(dtype),
        PEER: lambda: torch.autocast(device, dtype),
        EMPTY_MODE: BareMode,
        DISABLED: lambda: autocast(dtype, enabled=False),
    }
    found: Rows = {}
    for case, call in cases.items():
        seconds = alternate({name: loop(call, context) for name, context in contexts.items()}, rounds=rounds)
        found[case] = {}
        for name in (OURS, PEER, EMPTY_MODE, DISABLED):
            added = [1e6 * (one - plain) / calls for one, plain in zip(seconds[name], seconds["plain"], strict=True)]
            median, spread = median_and_spread(added)
            found[case][name] = {"median_microseconds": median, "spread_microseconds": spread}
    return found


def make_model(contender: str, workload: Workload, dtype: torch.dtype) -> GPT2LMHeadModel:
    """GPT-2, prepared as the contender does it."""
    model = workload.model()
    if contender in (OURS, OURS_CPU_TABLES):
        MixedPrecision(compute_dtype(dtype).name, tables="cpu" if contender == OURS_CPU_TABLES else "compact").attach(
            model
        )
    elif contender == PER_FORWARD:
        model.forward = convert_outputs_to_fp32(torch.autocast(workload.device, dtype)(model.forward))
    elif contender == WHOLE:
        model.to(dtype)  # type: ignore[arg-type]
    return model


def context(contender: str, workload: Workload, dtype: torch.dtype) -> Any:
    """Around each call of the model."""
    return torch.autocast(workload.device, dtype) if contender == PEER else contextlib.nullcontext()


def training(contender: str, workload: Workload, dtype: torch.dtype) -> Step:
    """Forward and backward."""
    model = make_model(contender, workload, dtype)
    ids = workload.token_ids().to(workload.device)

    def step() -> None:
        with context(contender, workload, dtype):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        model.zero_grad()

    return step


class _CastCounter(TorchDispatchMode):
    """Counts the casts of a model's weights to 16 bits."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self._weights = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
        self.casts = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.dtype in (torch.float16, torch.bfloat16):
            for source in args:
                is_weight = isinstance(source, Tensor) and source.untyped_storage()._cdata in self._weights
                self.casts += is_weight and source.dtype is torch.float32 and source.shape == result.shape
        return result


def weight_casts(contender: str, workload: Workload, dtype: torch.dtype) -> dict[str, int]:
    """How many casts of weights a forward makes when weights have not changed since the last one."""
    model = make_model(contender, workload, dtype)
    ids = workload.token_ids()[:1, :8].to(workload.device)
    for _ in range(2):
        with _CastCounter(model) as counter, context(contender, workload, dtype):
            model(input_ids=ids, labels=ids)
    return {"casts": counter.casts}


def compare(steps: Mapping[str, Step], rounds: int, floor_seconds: float) -> Rows:
    """Contenders that take turns, with their ratios to torch.autocast and to the floor."""
    return rows_of(alternate(steps, rounds=rounds, warmup=2), floor_seconds, ratio_to_torch_autocast=PEER)


def measure(
    layers: int = 4,
    width: int = 768,
    heads: int = 12,
    vocab: int = 50257,
    batch: int = 2,
    seq: int = 256,
    dtype: Annotated[str, typer.Option(help="bf16 or fp16")] = "bf16",
    calls: Annotated[int, typer.Option(help="timed at a time, for the cost of one")] = 50_000,
    rounds: int = 10,
    device: str = DEFAULT_DEVICE,
) -> Iterator[dict[str, Any]]:
    """Measure all three, and yield after each."""
    workload = Workload(layers, width, heads, vocab, batch, seq, device=device)
    torch_dtype, rates = DTYPES[dtype], DeviceRates.measure(workload)
    described = workload.as_dict()
    floors = {
        "forward_backward": described["flops"] / rates.flops_per_second[dtype],
        "cast_all_weights": (4 + 2) * described["parameters"] / rates.copy_bytes_per_second,
    }
    cast_model = workload.model()
    cast = alternate({"cast": lambda: rounded_copies(cast_model, torch_dtype)}, rounds=rounds)
    result: dict[str, Any] = {
        "workload": described,
        "dtype": dtype,
        "threads": torch.get_num_threads(),
        "floor_seconds": floors,
        "cast_all_weights": rows_of(cast)["cast"],
    }
    trained = {c: training(c, workload, torch_dtype) for c in CONTENDERS}
    result["forward_backward"] = compare(trained, rounds, floors["forward_backward"])
    trained.clear()
    yield result
    result["added_to_a_call"] = call_overhead(torch_dtype, device, calls, max(3, rounds))
    yield result
    result["weight_casts_per_forward"] = {c: weight_casts(c, workload, torch_dtype) for c in CONTENDERS}
    yield result
