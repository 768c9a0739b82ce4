"""TRL's SFTTrainer and DPOTrainer, as they are, with our callback added."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from covering import covering
from trainer_runs import logged
from trl_runs import load_default, save_tiny_qwen, trl_trainer

from hf_mp.step.forward import AttachedForward

trl = pytest.importorskip("trl")
peft = pytest.importorskip("peft")

RATES = {"sft": 0.5, "dpo": 0.05}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_qwen(tmp_path_factory.mktemp("model"), torch.float16)


def trainer_of(
    kind: str, contender: str, precision: str, saved: Path, path: Path, *, dtype: torch.dtype = torch.float32,
    lora: bool = False, **settings: Any,
) -> Any:  # fmt: skip
    adapter = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM") if lora else None
    settings = {"optim": "sgd", "learning_rate": RATES[kind], **settings}
    return trl_trainer(kind, contender, precision, load_default(kind, saved, dtype=dtype), path, adapter, **settings)


def test_the_bf16_that_trl_sets_unasked_is_named(tmp_path: Path, saved: Path) -> None:
    with pytest.raises(ValueError, match=r"bf16=True switches.*TRL's default is bf16=True: pass bf16=False"):
        trainer_of("sft", "callback", "fp16", saved, tmp_path, bf16=None)


DTYPES = (torch.float32, torch.float16)
OURS = ("callback fp16", "subclass fp16", "subclass fp16-lean", "callback bf16", "subclass bf16")


@pytest.mark.parametrize(
    ("ours", "dtype", "lora"),
    # with the callback, TRL makes the reference of a BF16 policy in the dtype of its masters
    [*covering(OURS, DTYPES, [False, True]), ("subclass fp16-lean", torch.bfloat16, False)],
    ids=str,
)
def test_policy_and_reference_agree_bit_for_bit(
    tmp_path: Path, saved: Path, ours: str, dtype: torch.dtype, lora: bool
) -> None:
    """At learning rate 0, as with the stock Trainer: a reference in another precision is 1e-2 nats away."""
    contender, precision = ours.split()
    settings = {"learning_rate": 0.0, "max_steps": 2, "dtype": dtype, "lora": lora}
    trainer = trainer_of("dpo", contender, precision, saved, tmp_path, **settings)
    products: list[torch.dtype] = []
    if not lora:
        reference = trainer.ref_model
        own_dtypes = [parameter.dtype for parameter in reference.parameters()]
        reference.model.layers[0].mlp.up_proj.register_forward_hook(lambda *call: products.append(call[-1].dtype))
    trainer.train()
    for key in ("rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies"):
        assert logged(trainer, key) == [0.0, 0.0]
    if not lora:
        assert set(products) == {torch.bfloat16 if precision == "bf16" else torch.float16}
        assert not any(isinstance(vars(module).get("forward"), AttachedForward) for module in reference.modules())
        assert [parameter.dtype for parameter in reference.parameters()] == own_dtypes


@pytest.mark.parametrize("contender", ["callback", "subclass"])
def test_a_reference_that_is_given_agrees(tmp_path: Path, contender: str) -> None:
    saved = save_tiny_qwen(tmp_path / "saved", torch.bfloat16)
    reference = load_default("dpo", saved)
    settings = {"learning_rate": 0.0, "max_steps": 1, "ref_model": reference}
    trainer = trainer_of("dpo", contender, "bf16", saved, tmp_path, **settings)
    assert trainer.ref_model is reference
    trainer.train()
    assert logged(trainer, "rewards/margins") == [0.0]
    assert {parameter.dtype for parameter in reference.parameters()} == {torch.bfloat16}
