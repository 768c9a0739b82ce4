"""What the callback costs beyond the Trainer subclass, next to the stock Trainer in FP32.

    python scripts/bench.py callback                       # the model of `make finetune`, batch 4 x 256
    python scripts/bench.py callback --width 768 --layers 4 --heads 12 --vocab 50257 --batch 2

What is timed is a whole step of the Trainer's loop, from ``on_step_begin`` to the next. Each trains twice, half of the
steps each time, all in turns and then in reverse order.
"""

from __future__ import annotations

import functools
from typing import Any

from transformers import TrainerCallback

from _benchmarks import Workload
from _contenders import make_trainer, trainers_in_turns
from _results import median_and_spread, rows_of
from hf_mp import MixedPrecisionCallback

CONTENDERS = {"subclass": "MixedPrecisionTrainer fp16", "callback": "Trainer fp32", "stock fp32": "Trainer fp32"}


def measure(
    layers: int = 3,
    width: int = 256,
    heads: int = 4,
    vocab: int = 1024,
    batch: int = 4,
    seq: int = 256,
    rounds: int = 60,
) -> dict[str, Any]:
    """Time a step of each: medians, spreads and the ratio of callback to subclass."""
    workload = Workload(layers, width, heads, vocab, batch, seq, positions=256)

    def trainer(name: str, max_steps: int) -> Any:
        callbacks: list[TrainerCallback] = [MixedPrecisionCallback("fp16")] if name == "callback" else []
        return make_trainer(CONTENDERS[name], workload, max_steps, callbacks=callbacks)

    trainers = {name: functools.partial(trainer, name) for name in CONTENDERS}
    *_, seconds = trainers_in_turns(trainers, "cpu", rounds=rounds, warmup=3)
    rounds_over = [c / s for c, s in zip(seconds["callback"], seconds["subclass"], strict=True)]
    median, spread = median_and_spread(rounds_over)
    return {
        "shape": {"layers": layers, "width": width, "vocab": vocab, "batch": batch, "seq": seq, "rounds": rounds},
        "contenders": rows_of(seconds, ratio_to_subclass="subclass"),
        "callback_over_subclass_per_round": {"median": median, "spread": spread},
    }
