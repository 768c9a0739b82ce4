"""What diagnostics cost: being ready to explain an overflow, one explanation, and histograms every 50 steps.

    python scripts/bench_diagnostics.py

One GPT-2 in FP16 mixed precision takes the same steps without diagnostics, with ``hf_mp.explain_overflows``, and under
``transformers.debug_utils.DebugUnderflowOverflow``, in turns in one process. A second copy of the first contender shows
how much the machine's noise is. Then a step whose batch is bad is timed with and without the explanation.

Histograms (``hf_mp.record_precision``) are timed on a step that they are taken of and on one between, which gives their
cost at one every 50 steps, and as 50 steps in a row with and without them.
Stores ``scripts/results/bench_diagnostics.json``.
"""

from __future__ import annotations

import contextlib
import functools
import io
import tempfile
from collections.abc import Callable

import torch
import typer
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.debug_utils import DebugUnderflowOverflow
from transformers.utils import logging

from _benchmarks import number, show_table
from _results import Timing, alternate, median_and_spread, save_result
from hf_mp import MixedPrecision, explain_overflows, record_precision
from hf_mp.scaling.scalers import StaticLossScaler

# Every how many steps histograms are taken; the first step of a run is one of them.
HISTOGRAMS = {"histograms, each step": 1, "histograms, between": 10**9, "histograms, every 50": 50}
EVERY = 50
CONTENDERS = (
    "off",
    "off again",
    "explain_overflows",
    "DebugUnderflowOverflow",
    "histograms, each step",
    "histograms, between",
)
BLOCKS = ("off", "off again", "histograms, every 50")


def make_step(contender: str, config: GPT2Config, batch: dict[str, Tensor], folder: str) -> Callable[[], None]:
    """One training step on ``batch``; what a run writes goes to ``folder``."""
    torch.manual_seed(0)
    model = GPT2LMHeadModel(config).train()
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


def make_block(step: Callable[[], None]) -> Callable[[], None]:
    """``EVERY`` steps in a row."""

    def block() -> None:
        for _ in range(EVERY):
            step()

    return block


def cost_of_histograms(good_steps: dict[str, Timing], blocks: dict[str, Timing]) -> dict[str, float]:
    """The share of training time that histograms take at one every ``EVERY`` steps, both ways."""
    between, each = (good_steps[f"histograms, {when}"].median_seconds for when in ("between", "each step"))
    off = good_steps["off"].median_seconds
    return {
        "from_single_steps": (between + (each - between) / EVERY) / off - 1.0,
        "from_blocks": blocks["histograms, every 50"].median_seconds / blocks["off"].median_seconds - 1.0,
        "noise_of_blocks": blocks["off again"].median_seconds / blocks["off"].median_seconds - 1.0,
    }


def main(
    width: int = 256, layers: int = 4, batch_size: int = 4, length: int = 128, rounds: int = 15, block_rounds: int = 3
) -> None:
    """Time the contenders and store the result."""
    logging.set_verbosity_error()
    config = GPT2Config(
        n_layer=layers, n_embd=width, n_head=4, vocab_size=2000, n_positions=length, bos_token_id=0, eos_token_id=0,
        use_cache=False,
    )  # fmt: skip
    ids = torch.randint(0, 2000, (batch_size, length), generator=torch.Generator().manual_seed(1))
    good = {"input_ids": ids, "labels": ids}
    embeddings = torch.randn(batch_size, length, width)
    embeddings[0, 0, 0] = float("nan")
    bad = {"inputs_embeds": embeddings, "labels": ids}

    with tempfile.TemporaryDirectory() as folder:
        make = functools.partial(make_step, config=config, folder=folder)
        seconds = alternate({name: make(name, batch=good) for name in CONTENDERS}, rounds=rounds, warmup=3)
        good_steps = {name: median_and_spread(found) for name, found in seconds.items()}
        seconds = alternate({name: make(name, batch=bad) for name in ("off", "explain_overflows")}, rounds=5)
        bad_steps = {name: median_and_spread(found) for name, found in seconds.items()}
        seconds = alternate({name: make_block(make(name, batch=good)) for name in BLOCKS}, rounds=block_rounds)
        blocks = {name: median_and_spread(found) for name, found in seconds.items()}
    cost = cost_of_histograms(good_steps, blocks)

    rows: list[tuple[str, ...]] = []
    ratios: dict[str, dict[str, float]] = {}
    for kind, timings in (("good", good_steps), ("bad", bad_steps), ("50 good", blocks)):
        off = timings["off"].median_seconds
        ratios[kind] = {name: timing.median_seconds / off for name, timing in timings.items()}
        for name, timing in timings.items():
            rows.append((f"{kind}: {name}", *map(number, (*timing, ratios[kind][name]))))
    show_table("Steps with and without diagnostics", ("step", "seconds", "spread", "ratio to off"), rows)
    print(
        f"histograms every {EVERY} steps: {cost['from_single_steps']:+.2%} from single steps, "
        f"{cost['from_blocks']:+.2%} in a row (noise {cost['noise_of_blocks']:+.2%})"
    )
    path = save_result(
        "bench_diagnostics",
        {
            "model": {"width": width, "layers": layers, "batch_size": batch_size, "length": length},
            "good_steps": {name: timing._asdict() for name, timing in good_steps.items()},
            "bad_steps": {name: timing._asdict() for name, timing in bad_steps.items()},
            "blocks_of_50_good_steps": {name: timing._asdict() for name, timing in blocks.items()},
            "ratios_to_off": ratios,
            "cost_of_histograms_every_50_steps": cost,
        },
    )
    print(f"stored in {path}")


if __name__ == "__main__":
    typer.run(main)
