"""What the dtype that a model is loaded in does to a fine-tuning: the case of trl's issue 3910, from a config.

    OMP_NUM_THREADS=1 python scripts/bench.py loading              # ten minutes of one CPU core
    python scripts/bench.py loading --scale small --steps 20       # seconds: to see that it runs

A small GPT-2 learns from the docstrings of this Python's library, in FP32, and is saved in BF16, as most models on the
Hub are. Then it is fine-tuned on the language reference with the Trainer's default settings: loaded in FP32, which
Transformers 4 did by itself; loaded as it was saved, which Transformers 5 does; and so with both adapters. All of them
see the same batches in the same order.
"""

from __future__ import annotations

import hf_mp.trainer  # isort: skip  before transformers: it imports bitsandbytes without a remark

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any, NamedTuple

import torch
from transformers import (
    AutoModelForCausalLM,
    PreTrainedModel,
    PrinterCallback,
    Trainer,
    TrainingArguments,
    default_data_collator,
)

import _results  # noqa: F401  says where recipes are
import hf_mp

# isort: split
from ablate_precision import SCALES, Texts, load_texts, pretrain

NAME = "compare_loading"


class Contender(NamedTuple):
    """One way to fine-tune the saved model.

    Attributes:
        dtype: to load it in; ``"auto"``, Transformers 5's default, is that which it was saved in.
        trainer: makes the Trainer, of keyword arguments that both classes take.
        settings: of its arguments.
    """

    dtype: Any
    trainer: Callable[..., Trainer] = Trainer
    settings: dict[str, Any] = {}  # noqa: RUF012  a default that nobody writes to


def with_callback(**given: Any) -> Trainer:
    """A stock Trainer, and one argument more."""
    return Trainer(**given, callbacks=[hf_mp.MixedPrecisionCallback("bf16", precision_contract=False)])


LEAN = {"precision_contract": False, "precision": "bf16-lean"}
CONTENDERS = {
    "loaded in FP32, stock Trainer": Contender(torch.float32),
    "loaded in BF16, stock Trainer": Contender("auto"),
    "loaded in BF16, stock Trainer, bf16=True": Contender("auto", settings={"bf16": True}),
    'loaded in BF16, MixedPrecisionCallback("bf16")': Contender("auto", with_callback),
    "loaded in BF16, MixedPrecisionTrainer, bf16-lean": Contender("auto", hf_mp.MixedPrecisionTrainer, LEAN),
}


def measure(
    scale: str = "full", steps: int = 600, learning_rate: float = 5e-5, evaluations: int = 12
) -> Iterator[dict[str, Any]]:
    """Held-out losses of each on its way, and the share of weights that end as they were loaded."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    sizes = SCALES[scale]
    texts = load_texts(sizes)
    settings = {"max_steps": steps, "learning_rate": learning_rate, "eval_steps": max(1, steps // evaluations)}
    settings |= {"per_device_train_batch_size": sizes.batch, "logging_steps": settings["eval_steps"]}
    settings |= {"use_cpu": device.type == "cpu"}  # or bf16=True is refused there
    workload = asdict(sizes) | {"steps": steps, "learning_rate": learning_rate}
    rows: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        pretrain(sizes, texts.library, device).bfloat16().save_pretrained(folder)
        for name, contender in CONTENDERS.items():
            rows[name] = fine_tune(folder, contender, texts, settings)
            yield {"workload": workload, "threads": torch.get_num_threads(), "contenders": rows}


def fine_tune(folder: str, contender: Contender, texts: Texts, settings: dict[str, Any]) -> dict[str, Any]:
    """Load the model, train it, and tell how its losses went."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=contender.dtype)
    model.loss_type = "ForCausalLM"  # which GPT-2 does not say itself: the Trainer would count a token too many a row
    loaded = copies(model)
    arguments = hf_mp.MixedPrecisionArguments if "precision" in contender.settings else TrainingArguments
    trainer = contender.trainer(
        model=model,
        args=arguments(
            f"{folder}/out",
            eval_strategy="steps",
            eval_on_start=True,
            per_device_eval_batch_size=64,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            **settings,
            **contender.settings,
        ),
        train_dataset=texts.reference,
        eval_dataset=texts.held_out,
        data_collator=default_data_collator,
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    logs = trainer.state.log_history
    evaluated = [entry for entry in logs if "eval_loss" in entry]
    unmoved = sum(int((old == new).sum()) for old, new in zip(loaded, copies(model), strict=True))
    return {
        "steps": [entry["step"] for entry in evaluated],
        "eval_losses": [entry["eval_loss"] for entry in evaluated],
        "training_losses": [entry["loss"] for entry in logs if "loss" in entry],
        "unmoved": unmoved / sum(one.numel() for one in loaded),
    }


def copies(model: PreTrainedModel) -> list[torch.Tensor]:
    """Of the weights, in FP32."""
    return [weight.detach().float().clone() for weight in model.parameters()]
