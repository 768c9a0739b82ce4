"""The precision contract of a stock Trainer over a model that came in BF16, next to ours, and what all of it costs.

    python scripts/bench.py contracts                              # a minute on a CPU
    python scripts/bench.py contracts --layers 1 --width 64        # seconds: to see that it runs

Trains a GPT-2 for a step, and has ``hf-mp check`` read a checkpoint whose files are sparse, so that they take no disk.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW
from torch.serialization import skip_data
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

import hf_mp
from hf_mp.diagnostics.contract.check import check_folder
from hf_mp.diagnostics.contract.record import ContractRecorder

NAME = "show_contracts"


class Check(TrainerCallback):
    """Notes what :func:`hf_mp.check_training` says when a step has been taken."""

    found: hf_mp.TrainingCheck

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.found = hf_mp.check_training(kwargs["model"], kwargs["optimizer"])


def measure(
    layers: int = 12, width: int = 768, learning_rate: float = 1e-5, rounds: int = 5, gibibytes: int = 10
) -> dict[str, Any]:
    """Both contracts, the least seconds that taking one adds to a step, and those of a check of so large a folder."""
    sizes = {"layers": layers, "width": width, "learning_rate": learning_rate}
    contracts = {"stock Trainer": run("fp32", sizes), "with MixedPrecisionCallback": run("bf16", sizes)}
    model = make_model(sizes)
    optimizer = AdamW(model.parameters())
    ids = torch.arange(16)[None]
    many = nn.Sequential(*(nn.Linear(8, 8) for _ in range(500)))
    costs = {
        "gpt2": least_seconds(model, optimizer, lambda: model(input_ids=ids, labels=ids).loss, rounds),
        "1,000 tensors": least_seconds(many, AdamW(many.parameters()), lambda: many(torch.ones(1, 8)).sum(), rounds),
    }
    checked = {"gibibytes": gibibytes, "seconds": seconds_to_check(gibibytes)}
    return {"workload": sizes, "contracts": contracts, "seconds_to_take": costs, "checked": checked}


def make_model(sizes: dict[str, Any]) -> GPT2LMHeadModel:
    """A GPT-2 in BF16, as ``from_pretrained`` gives one that was saved so."""
    torch.manual_seed(0)
    config = GPT2Config(n_layer=sizes["layers"], n_embd=sizes["width"], n_head=max(1, sizes["width"] // 64))
    return GPT2LMHeadModel(config).bfloat16()


def run(precision: str, sizes: dict[str, Any]) -> dict[str, Any]:
    """The contract of a Trainer's step, and the share of updates that it loses; ``fp32`` leaves it as it is."""
    row = {"input_ids": (ids := torch.arange(16)), "labels": ids}
    callback, check = hf_mp.MixedPrecisionCallback(precision, check_gradients=False), Check()
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder,
            max_steps=1,
            learning_rate=sizes["learning_rate"],
            lr_scheduler_type="constant",
            per_device_train_batch_size=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
        )
        model = make_model(sizes)
        Trainer(model=model, args=args, train_dataset=[row] * 4, callbacks=[callback, check]).train()
    assert callback.session is not None and callback.session.contract is not None
    return {
        "rows": list(callback.session.contract.cells()),
        "lost_share": check.found.lost_share,
        "risks": [risk.kind for risk in check.found.risks],
    }


class Timed(ContractRecorder):
    """Adds up the time that it takes."""

    seconds = 0.0

    def _record_forward(self, *given: Any) -> None:
        began = time.perf_counter()
        super()._record_forward(*given)
        self.seconds += time.perf_counter() - began


def least_seconds(model: nn.Module, optimizer: Any, loss: Callable[[], Any], rounds: int) -> float:
    """The least seconds that a contract adds to a step: hooks on, hooks called, tensors read, hooks off.

    The least, because what other programs take of the machine only adds.
    """
    taken = []
    for _ in range(rounds):
        recorder = Timed(model)
        began = time.perf_counter()
        recorder.start()
        recorder.seconds += time.perf_counter() - began
        loss().backward()
        began = time.perf_counter()
        recorder.contract(optimizer)
        recorder.close()
        taken.append(recorder.seconds + time.perf_counter() - began)
    return min(taken)


def seconds_to_check(gibibytes: int) -> float:
    """Of :func:`check_folder`, for BF16 weights and the FP32 moments that ``torch.save`` writes next to them."""
    weights = gibibytes * 2**30 // 10  # of which each takes 2 + 4 + 4 bytes
    parts = {str(index): torch.empty(weights // 64, dtype=torch.bfloat16) for index in range(64)}
    moments = {
        index: {name: torch.empty(len(part)) for name in ("exp_avg", "exp_avg_sq")} for index, part in parts.items()
    }
    with tempfile.TemporaryDirectory() as folder:
        with skip_data():  # names and sizes alone: what is between them is a hole in the file
            torch.save(parts, Path(folder, "pytorch_model.bin"))
            torch.save({"state": moments, "param_groups": [{"lr": 1e-5}]}, Path(folder, "optimizer.pt"))
        began = time.perf_counter()
        check_folder(Path(folder))
        return time.perf_counter() - began
