"""The risky patterns of docs/precision.md on a tiny model: what goes wrong, how the contract shows it, what helps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from planted_checkpoints import cast_weights, stock, to_bf16
from torch import nn
from torch.optim import SGD, AdamW
from trainer_runs import quick_arguments, tiny_gpt2, token_rows
from transformers import GPT2LMHeadModel, Trainer

import hf_mp
from hf_mp import MixedPrecisionCallback, PrecisionContract
from hf_mp.diagnostics.contract.check import check_folder

BATCH = {"input_ids": torch.arange(16)[None], "labels": torch.arange(16)[None]}
SETTINGS = {"max_steps": 2, "learning_rate": 1e-5, "lr_scheduler_type": "constant", "optim": "adamw_torch"}


def values(contract: PrecisionContract, column: str) -> set[str]:
    return {getattr(row, column) for row in contract.rows}


def norms_moved(model: nn.Module) -> float:
    """The share of norm weights that are not 1 any more."""
    return float(
        (torch.cat([one.detach() for name, one in model.named_parameters() if "ln_" in name and one[0] > 0.5]) != 1)
        .float()
        .mean()
    )


def saved_in_bf16(path: Path) -> GPT2LMHeadModel:
    tiny_gpt2(torch.bfloat16).save_pretrained(path)
    return GPT2LMHeadModel.from_pretrained(path)


@pytest.mark.usefixtures("without_first_check")
def test_a_stock_trainer_over_a_model_as_it_comes(tmp_path: Path) -> None:
    moved, contracts = {}, {}
    for precision in ("fp32", "bf16"):
        model, callback = saved_in_bf16(tmp_path / "model"), MixedPrecisionCallback(precision)
        args = quick_arguments(tmp_path, **SETTINGS)
        Trainer(model=model, args=args, train_dataset=token_rows(), callbacks=[callback]).train()
        moved[precision], contracts[precision] = norms_moved(model), callback.session.contract
    assert moved["fp32"] == 0.0 and moved["bf16"] > 0.95
    assert all(values(contracts["fp32"], column) == {"bf16"} for column in ("stored", "gradient", "moments", "saved"))
    assert all(values(contracts["bf16"], column) == {"fp32"} for column in ("stored", "gradient", "moments", "saved"))


def test_autocast_gives_no_masters(tmp_path: Path) -> None:
    model = saved_in_bf16(tmp_path / "model")
    args = quick_arguments(tmp_path, bf16=True, **SETTINGS)
    trainer = Trainer(model=model, args=args, train_dataset=token_rows())
    trainer.train()
    assert norms_moved(model) == 0.0
    assert values(hf_mp.precision_contract(model, trainer.optimizer), "stored") == {"bf16"}
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    model = saved_in_bf16(tmp_path / "model")
    prepared, optimizer = accelerator.prepare(model, AdamW(model.parameters(), lr=1e-5))

    def step() -> None:
        accelerator.backward(prepared(**BATCH).loss)
        optimizer.step()

    contract = hf_mp.precision_contract(model, optimizer, run=step)
    assert values(contract, "stored") == values(contract, "moments") == {"bf16"}
    assert norms_moved(model) == 0.0
    assert [risk.kind for risk in hf_mp.check_training(model, optimizer).risks][:1] == ["no masters"]


def test_trl_trains_a_model_as_it_is_given(tmp_path: Path) -> None:
    pytest.importorskip("trl")
    from trl_runs import load_default, save_tiny_qwen, trl_trainer

    model = load_default("sft", save_tiny_qwen(tmp_path / "model"))
    trainer = trl_trainer("sft", "stock", "", model, tmp_path, bf16=None, **SETTINGS)
    trainer.train()
    contract = hf_mp.precision_contract(trainer.model, trainer.optimizer)
    assert values(contract, "stored") == values(contract, "moments") == {"bf16"}
    assert hf_mp.check_training(trainer.model, trainer.optimizer).risks[0].kind == "no masters"


def test_adapters_in_the_dtype_of_the_base() -> None:
    peft = pytest.importorskip("peft")
    for is_cast, dtype in ((False, "bf16"), (True, "fp32")):
        config = peft.LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True)
        model = peft.get_peft_model(tiny_gpt2(torch.bfloat16), config, autocast_adapter_dtype=is_cast)
        optimizer = AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-5)
        contract = hf_mp.precision_contract(model, optimizer, run=lambda model=model: model(**BATCH).loss.backward())
        assert {row.stored for row in contract.rows if row.kind == "adapters"} == {dtype}
        assert bool(hf_mp.check_training(model, optimizer).risks) == (dtype == "bf16")


def test_a_second_moment_in_bf16_never_falls() -> None:
    for dtype, falls in ((torch.bfloat16, False), (torch.float32, True)):
        weight = nn.Parameter(torch.ones(64, dtype=dtype))
        optimizer = AdamW([weight], lr=1e-5)
        weight.grad = torch.linspace(0.5, 1.0, 64).to(dtype)
        optimizer.step()
        first = optimizer.state[weight]["exp_avg_sq"].clone()
        for _ in range(50):
            weight.grad = torch.zeros_like(weight)
            optimizer.step()
        assert bool((optimizer.state[weight]["exp_avg_sq"] < first).all()) == falls
        assert torch.equal(optimizer.state[weight]["exp_avg_sq"], first) != falls
        kinds = {risk.kind for risk in hf_mp.check_training(nn.ParameterList([weight]), optimizer).risks}
        assert ("stuck second moments" in kinds) != falls


def test_adamw_in_fp16_makes_nan() -> None:
    model = tiny_gpt2(torch.float16)
    optimizer: Any = AdamW(model.parameters(), lr=1e-5)

    def step() -> None:
        model(**BATCH).loss.backward()
        optimizer.step()

    contract = hf_mp.precision_contract(model, optimizer, run=step)
    assert values(contract, "stored") == values(contract, "moments") == {"fp16"}
    assert any(one.isnan().any() for one in model.parameters())
    model = tiny_gpt2(torch.float16)
    model, optimizer = hf_mp.prepare(model, AdamW(model.parameters(), lr=1e-5), "fp16")
    contract = hf_mp.precision_contract(model, optimizer, run=step)
    assert values(contract, "stored") == values(contract, "moments") == {"fp32"}
    assert not any(one.isnan().any() for one in model.parameters())


def test_micro_batches_vanish_in_a_bf16_sum() -> None:
    for dtype, lost in ((torch.bfloat16, True), (torch.float32, False)):
        weight = nn.Linear(1, 1, bias=False).to(dtype)
        weight(torch.ones(1, 1, dtype=dtype)).backward()
        for _ in range(100):
            (weight(torch.ones(1, 1, dtype=dtype)) * 2.0**-9).backward()
        assert (weight.weight.grad.item() == 1.0) == lost
        (row,) = hf_mp.precision_contract(weight, SGD(weight.parameters())).rows
        assert row.gradient == {True: "bf16", False: "fp32"}[lost]


def test_a_rounded_checkpoint_resumes_elsewhere(tmp_path: Path) -> None:
    checkpoint = stock(tmp_path)
    assert check_folder(checkpoint).risks == ()
    cast_weights(checkpoint, to_bf16)
    (risk,) = check_folder(checkpoint).risks
    assert risk.kind == "rounded weights" and "save_dtype leaves checkpoints in FP32" in risk.way_out
