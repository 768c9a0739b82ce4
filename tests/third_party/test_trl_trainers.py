"""Each of TRL's Trainers with our callback, with and without LoRA, against the stock one in FP32.

With SGD, because AdamW hardly notices a wrong factor on all gradients. The Trainers that generate draw the same tokens.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from trainer_runs import callback_of, difference, logged, same, weights
from trl_runs import KINDS, load_default, save_tiny_qwen, trl_trainer

trl = pytest.importorskip("trl")
peft = pytest.importorskip("peft")

RATES = {"sft": 0.5, "dpo": 0.05, "kto": 0.5, "reward": 0.05, "grpo": 0.5, "rloo": 0.05}
SETTINGS = {"optim": "sgd", "lr_scheduler_type": "constant", "max_grad_norm": 0.5}
# Entries of a log that need not be equal, or are small differences of large numbers.
NOT_COMPARED = ("time", "per_second", "margin", "accura", "rewards/", "logits/", "kl")
# TRL's own defaults for those that generate nothing: gradient checkpointing among them.
DEFAULTS: dict[str, dict[str, Any]] = {
    "sft": {"gradient_checkpointing": True, "gradient_accumulation_steps": 2},
    "dpo": {"gradient_checkpointing": True},
}


def cases(*in_every_run: tuple[str, bool]) -> list[Any]:
    """Each Trainer, with and without LoRA."""
    return [
        pytest.param(kind, lora, marks=() if (kind, lora) in in_every_run else pytest.mark.exhaustive)
        for kind in KINDS
        for lora in (False, True)
    ]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_qwen(tmp_path_factory.mktemp("model"), torch.float16)


def trainer_of(kind: str, contender: str, precision: str, lora: bool, saved: Path, path: Path, **settings: Any) -> Any:
    loading = {} if precision == "fp16" else {"dtype": torch.float32}  # ours as it loads by default: in FP16
    task = KINDS[kind].task
    adapter = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type=task) if lora else None
    settings = {"learning_rate": RATES[kind], **SETTINGS, **DEFAULTS.get(kind, {}), **settings}
    return trl_trainer(kind, contender, precision, load_default(kind, saved, **loading), path, adapter, **settings)


@pytest.mark.parametrize(
    ("kind", "lora"), cases(("sft", True), ("dpo", False), ("kto", True), ("reward", False), ("grpo", False))
)
def test_fp16_follows_the_stock_trainer_in_fp32(tmp_path: Path, saved: Path, kind: str, lora: bool) -> None:
    stock = trainer_of(kind, "stock", "", lora, saved, tmp_path)
    ours = trainer_of(kind, "callback", "fp16", lora, saved, tmp_path)
    start = weights(stock.model)
    with torch.no_grad():  # peft draws an adapter in the base's dtype
        for parameter, drawn in zip(ours.model.parameters(), start, strict=True):
            parameter.copy_(drawn)
    for trainer in (stock, ours):
        torch.manual_seed(1)  # of what is generated
        trainer.train()
    assert callback_of(ours).mixed_precision.stats.steps == 3
    first = stock.state.log_history[0]
    for key in (key for key in first if not any(word in key for word in NOT_COMPARED)):
        expected = logged(stock, key)
        assert logged(ours, key) == pytest.approx(expected, abs=max(5e-3 * max(map(abs, expected)), 1e-6)), key
    if "kl" in first:  # the reference runs in the autocast of the policy: at equal weights they agree bit for bit
        assert logged(ours, "kl")[0] == 0.0
        assert logged(ours, "kl") == pytest.approx(logged(stock, "kl"), rel=0.1, abs=2e-3)
    assert not same(weights(ours.model), weights(stock.model))
    trained = [parameter.requires_grad for parameter in stock.model.parameters()]
    ends = [
        [weight.float() for weight, is_trained in zip(run, trained, strict=True) if is_trained]
        for run in (weights(ours.model), weights(stock.model), start)
    ]
    assert difference(*ends) < 0.01
    assert {p.dtype for p in ours.model.parameters() if p.requires_grad} == {torch.float32}


def test_the_reference_of_the_callback_is_as_small_as_its_settings_say(tmp_path: Path) -> None:
    """Without them TRL makes it in the dtype of the policy, which has FP32 masters by then."""
    saved = save_tiny_qwen(tmp_path / "saved", torch.bfloat16)
    settings = {"learning_rate": 0.0, "max_steps": 1, "model_init_kwargs": {"dtype": "bfloat16"}}
    trainer = trl_trainer("dpo", "callback", "fp16", load_default("dpo", saved), tmp_path, **settings)
    assert {parameter.dtype for parameter in trainer.ref_model.parameters()} == {torch.bfloat16}
    trainer.train()
    assert logged(trainer, "rewards/margins") == [0.0]
