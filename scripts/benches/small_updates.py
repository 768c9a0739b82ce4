"""What becomes of small updates: TRL's Trainers on a model saved in BF16, loaded as ``from_pretrained`` does it.

    python scripts/bench.py small_updates                          # 50 steps at 1e-5; minutes on a CPU
    python scripts/bench.py small_updates --steps 3 --kinds sft    # seconds: to see that it runs

Counts the weights that moved, and compares the losses with those of the same training in FP32. A resumed run loads the
model anew, by default again, and goes on from the checkpoint of its middle.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Annotated, Any

import datasets
import torch
import trl
import typer
from transformers import PrinterCallback, set_seed
from transformers.utils import logging

import hf_mp
from _trl_tasks import KINDS, load_default, named_for, save_tiny_qwen, shares_moved

NAME = "compare_small_updates"
DRAW_TOKENS = ("grpo", "rloo")  # of their losses, which are about 0, each run has others as soon as one token differs
FP32, STOCK = "FP32", "stock, as loaded by default"
CONTENDERS: dict[str, dict[str, Any]] = {
    FP32: {"dtype": torch.float32, "settings": {"bf16": False}},
    STOCK: {},
    "stock, resumed": {"resumed": True},
    **{f"hf_mp {name}": {"callback": name} for name in ("bf16", "fp16")},
    **{f"hf_mp {name}, resumed": {"callback": name, "resumed": True} for name in ("bf16", "fp16")},
}


def make_trainer(kind: str, saved: Path, folder: Path, steps: int, learning_rate: float, **contender: Any) -> Any:
    """TRL's Trainer of a kind, over the model as the contender loads it."""
    precision = contender.get("callback")
    set_seed(7)
    loading = {"dtype": contender["dtype"]} if "dtype" in contender else {}
    config = getattr(trl, f"{KINDS[kind].trainer}Config")
    args = config(
        output_dir=str(folder),
        learning_rate=learning_rate,
        lr_scheduler_type="constant",
        max_steps=steps,
        save_steps=steps // 2,
        per_device_train_batch_size=4,
        gradient_checkpointing=False,
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        **{**KINDS[kind].settings, **({"bf16": False} if precision else {}), **contender.get("settings", {})},
    )
    trainer = getattr(trl, f"{KINDS[kind].trainer}Trainer")(
        model=load_default(kind, saved, **loading),
        args=args,
        callbacks=[hf_mp.MixedPrecisionCallback(precision)] if precision else [],
        **named_for(kind),
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def train(kind: str, saved: Path, steps: int, learning_rate: float, contender: dict[str, Any]) -> dict[str, Any]:
    """One run: shares of what moved, and the losses."""
    start = {name: one.detach().float() for name, one in load_default(kind, saved).named_parameters()}
    folder = Path(tempfile.mkdtemp())
    try:
        trainer = make_trainer(kind, saved, folder, steps, learning_rate, **contender)
        check = hf_mp.check_training(trainer.model, trainer.create_optimizer())
        trainer.train()
        if contender.get("resumed"):
            trainer = make_trainer(kind, saved, folder, steps, learning_rate, **contender)
            trainer.train(resume_from_checkpoint=str(folder / f"checkpoint-{steps // 2}"))
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        moved = shares_moved(trainer.model, start)
    finally:
        shutil.rmtree(folder)
    return {**moved._asdict(), "losses": losses, "lost_share_told": check.lost_share}


def off(losses: list[float], expected: list[float]) -> float:
    """The largest difference, as a share of the largest expected loss."""
    return max(abs(a - b) for a, b in zip(losses, expected, strict=True)) / max(map(abs, expected))


def measure(
    steps: int = 50,
    learning_rate: float = 1e-5,
    kinds: Annotated[list[str] | None, typer.Option(help="Repeatable. Default: all.")] = None,
) -> dict[str, Any]:
    """Train every kind with every contender, and count what moved."""
    logging.disable_progress_bar()
    datasets.disable_progress_bars()
    torch.set_num_threads(1)
    result: dict[str, Any] = {"steps": steps, "learning_rate": learning_rate, "kinds": {}}
    with tempfile.TemporaryDirectory() as folder:
        saved = save_tiny_qwen(Path(folder))
        for kind in kinds or KINDS:
            result["kinds"][kind] = rows = {}
            for name, contender in CONTENDERS.items():
                rows[name] = row = train(kind, saved, steps, learning_rate, contender)
                if kind not in DRAW_TOKENS:
                    row["loss_off"] = off(row["losses"], rows[FP32]["losses"])
                print(f"{kind:8} {name:28} matrices {row['matrices']:.1%}, norms {row['norms']:.1%}", flush=True)
            for row in rows.values():
                del row["losses"]
    return result
