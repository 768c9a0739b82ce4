"""Small updates survive: a model saved in BF16, loaded as ``from_pretrained`` does by default, trained at 1e-5.

In FP32 such a training moves its weights; the stock Trainers, without masters, leave most of them where they were.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from trainer_runs import logged, make_trainer, quick_arguments, same, weights
from transformers import Trainer
from trl_runs import load_default, save_tiny_qwen, shares_moved, trl_trainer

trl = pytest.importorskip("trl")
peft = pytest.importorskip("peft")

SETTINGS = {"learning_rate": 1e-5, "lr_scheduler_type": "constant", "optim": "adamw_torch", "max_steps": 3}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_qwen(tmp_path_factory.mktemp("model"))


def token_rows() -> list[dict[str, Any]]:
    ids = torch.randint(3, 63, (32, 24), generator=torch.Generator().manual_seed(2))
    return [{"input_ids": row, "labels": row} for row in ids]


def trainer_for(kind: str, contender: str, precision: str, saved: Path, path: Path, **settings: Any) -> Any:
    model = load_default("sft" if kind == "plain" else kind, saved, **settings.pop("loading", {}))
    settings = {**SETTINGS, **settings}
    if kind == "plain":
        args = quick_arguments(path / contender, **settings)
        return make_trainer(contender, precision, model, args, Trainer, train_dataset=token_rows())
    return trl_trainer(kind, contender, precision, model, path, **settings)


def moved_by(trainer: Any) -> Any:
    start = {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}
    trainer.train()
    return shares_moved(trainer.model, start)


SLOW = pytest.mark.exhaustive


@pytest.mark.parametrize(
    "kind", ["plain", "sft", "grpo", pytest.param("dpo", marks=SLOW), pytest.param("reward", marks=SLOW)]
)
def test_what_moves_in_fp32_moves_with_the_callback_and_not_in_the_stock_trainer(
    tmp_path: Path, saved: Path, kind: str
) -> None:
    trl_default = {} if kind == "plain" else {"bf16": None}
    stock = trainer_for(kind, "stock", "", saved, tmp_path, **trl_default)
    assert {parameter.dtype for name, parameter in stock.model.named_parameters()} == {torch.bfloat16}
    without_masters = moved_by(stock)
    assert without_masters.norms == 0.0 and without_masters.matrices < 0.05
    fp32 = trainer_for(kind, "stock", "", saved, tmp_path, loading={"dtype": torch.float32})
    in_fp32 = moved_by(fp32)
    assert in_fp32.norms > 0.98 and in_fp32.matrices > 0.9
    ours = trainer_for(kind, "callback", "bf16", saved, tmp_path)
    assert moved_by(ours) == pytest.approx(in_fp32, abs=0.01)
    assert logged(ours, "loss") == pytest.approx(logged(fp32, "loss"), rel=0.02, abs=1e-3)


@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp16-lean", "bf16-lean"])
def test_what_moves_in_fp32_moves_with_the_subclass(
    tmp_path: Path, saved: Path, precision: str, without_first_check: None
) -> None:
    in_fp32 = moved_by(trainer_for("plain", "stock", "", saved, tmp_path, loading={"dtype": torch.float32}))
    ours = moved_by(trainer_for("plain", "subclass", precision, saved, tmp_path))
    # Three updates of up to 1e-5 bring about one norm weight of 192, all at 1, back to 1: FP32 has steps of 1e-7 there.
    assert tuple(ours) == pytest.approx(tuple(in_fp32), abs=0.02)


@pytest.mark.parametrize(
    ("kind", "contender", "precision"),
    [
        ("plain", "subclass", "bf16-lean"),
        ("plain", "callback", "fp16"),
        pytest.param("sft", "callback", "bf16", marks=SLOW),
        pytest.param("adapter", "callback", "bf16", marks=SLOW),
        ("adapter", "subclass", "fp16-lean"),
    ],
)
def test_a_resumed_run_has_its_masters(
    tmp_path: Path, saved: Path, kind: str, contender: str, precision: str, without_first_check: None
) -> None:
    """Bit for bit: a checkpoint in BF16, or a resume that loads into BF16 weights, would end elsewhere."""

    def train(path: Path, checkpoint: str | None = None, **settings: Any) -> Any:
        if kind == "adapter":
            settings["peft_config"] = peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["norm", "lm_head"])
        name = "sft" if kind == "adapter" else kind
        trainer = trainer_for(name, contender, precision, saved, path, max_steps=4, **settings)
        trainer.train(resume_from_checkpoint=checkpoint)
        return trainer

    whole = train(tmp_path)
    settings = {"save_steps": 2, "save_strategy": "steps"}
    first = train(tmp_path / "first", **settings)
    checkpoint = str(Path(first.args.output_dir, "checkpoint-2"))
    resumed = train(tmp_path / "first", checkpoint, **settings)
    assert same(weights(resumed.model), weights(whole.model))
    if kind == "adapter":
        return
    start = dict(load_default("sft", saved).named_parameters())
    assert shares_moved(resumed.model, start).norms > 0.98
    # and a run that takes the checkpoint for its model gets the masters, without being told a dtype
    again = load_default("sft", Path(checkpoint))
    assert {parameter.dtype for parameter in again.parameters()} == {torch.float32}
    assert shares_moved(again, start).norms > 0.98


@pytest.mark.parametrize("precision", [pytest.param("bf16", marks=SLOW), "bf16-lean"])
def test_the_best_adapter_comes_back_with_all_its_bits(tmp_path: Path, saved: Path, precision: str) -> None:
    adapter = peft.LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["norm"])
    settings = {"save_steps": 1, "save_strategy": "steps", "eval_strategy": "steps", "eval_steps": 1}
    best = {"learning_rate": 1e-2, "load_best_model_at_end": True, "greater_is_better": True}
    trainer = trainer_for("sft", "subclass", precision, saved, tmp_path, peft_config=adapter, **settings, **best)
    trainer.train()
    file = Path(trainer.state.best_model_checkpoint, "adapter_model.safetensors")
    stored = safetensors.torch.load_file(file)
    loaded = peft.get_peft_model_state_dict(trainer.model)
    assert trainer.state.best_model_checkpoint.endswith("checkpoint-1")  # the loss falls, and the largest is wanted
    assert stored.keys() == loaded.keys()
    assert all(torch.equal(stored[name], loaded[name]) for name in stored)
