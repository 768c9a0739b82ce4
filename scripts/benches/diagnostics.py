"""What diagnostics cost: being ready to explain an overflow, one explanation, and histograms every 50 steps.

    python scripts/bench.py diagnostics

One GPT-2 in FP16 mixed precision takes the same steps without diagnostics, with ``hf_mp.explain_overflows``, and under
``transformers.debug_utils.DebugUnderflowOverflow``, in turns in one process. A second copy of the first contender shows
how much the machine's noise is. Then a step whose batch is bad is timed with and without the explanation. Histograms
(``hf_mp.record_precision``) are timed on a step that they are taken of and on one between.
"""

from __future__ import annotations

import contextlib
import io
import tempfile
from typing import Any

import torch
from torch import Tensor
from transformers.debug_utils import DebugUnderflowOverflow

from _benchmarks import Workload
from _contenders import Step
from _results import alternate, median_and_spread
from hf_mp import MixedPrecision, explain_overflows, record_precision
from hf_mp.scaling.scalers import StaticLossScaler

HISTOGRAMS = {"histograms, each step": 1, "histograms, between": 10**9}  # every how many steps they are taken
CONTENDERS = ("off", "off again", "explain_overflows", "DebugUnderflowOverflow", *HISTOGRAMS)
EVERY = 50


def make_step(contender: str, workload: Workload, batch: dict[str, Tensor], folder: str) -> Step:
    """One training step on ``batch``; what a run writes goes to ``folder``."""
    model = workload.model()
    runtime = MixedPrecision("fp16", loss_scaler=StaticLossScaler(2.0**10, max_consecutive_skips=10**9))
    runtime.attach(model)
    optimizer = runtime.attach_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-5))
    explainer = explain_overflows(model) if contender == "explain_overflows" else None
    if contender in HISTOGRAMS:
        record_precision(model, f"{folder}/{contender}", histogram_steps=HISTOGRAMS[contender])
    debugger = DebugUnderflowOverflow(model) if contender == "DebugUnderflowOverflow" else None

    def step() -> None:
        # The debugger prints a table of each of its first batches that it was not asked for.
        with contextlib.redirect_stdout(io.StringIO()) if debugger else contextlib.nullcontext():
            model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if explainer is not None:
            explainer._unclean_steps = 0  # every one of these skips is replayed

    return step


def measure(
    width: int = 256, layers: int = 4, batch_size: int = 4, length: int = 128, rounds: int = 15
) -> dict[str, Any]:
    """Time good and bad steps: medians, spreads, ratios to a step without diagnostics."""
    workload = Workload(layers, width, 4, 2000, batch_size, length, dropout=0.1, positions=length)
    ids = workload.token_ids()
    embeddings = torch.randn(batch_size, length, width)
    embeddings[0, 0, 0] = float("nan")
    batches = {"good": {"input_ids": ids, "labels": ids}, "bad": {"inputs_embeds": embeddings, "labels": ids}}
    contenders = {"good": CONTENDERS, "bad": ("off", "explain_overflows")}
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for kind, names in contenders.items():
            steps = {name: make_step(name, workload, batches[kind], folder) for name in names}
            timings = {
                name: median_and_spread(found) for name, found in alternate(steps, rounds=rounds, warmup=3).items()
            }
            off = timings["off"].median_seconds
            result[f"{kind}_steps"] = {
                name: {**timing._asdict(), "ratio_to_off": timing.median_seconds / off}
                for name, timing in timings.items()
            }
    between, each = (result["good_steps"][name]["ratio_to_off"] for name in reversed(HISTOGRAMS))
    result["cost_of_histograms_every_50_steps"] = between + (each - between) / EVERY - 1.0
    return {"model": {"width": width, "layers": layers, "batch_size": batch_size, "length": length}, **result}
