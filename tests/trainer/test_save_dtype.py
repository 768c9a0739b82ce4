"""``save_dtype``: a model goes out in the dtype that was asked for, and checkpoints keep their FP32 weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from trainer_runs import quick_arguments, tiny_gpt2, token_rows
from transformers import GPT2LMHeadModel, Trainer

from hf_mp import MixedPrecisionArguments, MixedPrecisionCallback, MixedPrecisionTrainer

pytestmark = pytest.mark.usefixtures("without_first_check")


def train(kind: str, save_dtype: str, path: Path, model: Any, precision: str = "bf16") -> Any:
    settings = {"max_steps": 2, "learning_rate": 1e-3, "save_strategy": "steps", "save_steps": 2}
    if kind == "callback":
        callbacks = [MixedPrecisionCallback(precision, save_dtype=save_dtype)]
        args = quick_arguments(path, **settings)
        trainer: Any = Trainer(model=model, args=args, train_dataset=token_rows(), callbacks=callbacks)
    else:
        args = quick_arguments(path, MixedPrecisionArguments, precision=precision, save_dtype=save_dtype, **settings)
        trainer = MixedPrecisionTrainer(model=model, args=args, train_dataset=token_rows())
    trainer.train()
    return trainer


@pytest.mark.parametrize(
    ("kind", "save_dtype", "loaded", "written"),
    [
        ("callback", "fp32", torch.bfloat16, torch.float32),
        ("callback", "original", torch.bfloat16, torch.bfloat16),
        ("subclass", "original", torch.float32, torch.float32),
        ("callback", "fp16", torch.float32, torch.float16),
        ("subclass", "bf16", torch.float16, torch.bfloat16),
    ],
)
def test_a_model_is_saved_in_what_was_asked_for(kind, save_dtype, loaded, written, tmp_path: Path) -> None:
    trainer = train(kind, save_dtype, tmp_path, tiny_gpt2(loaded))
    trainer.save_model(str(tmp_path / "model"))
    saved = load_file(tmp_path / "model" / "model.safetensors")
    in_memory = trainer.model.state_dict()
    assert "lm_head.weight" not in saved  # tied, and written once
    for name, value in saved.items():
        assert value.dtype is written
        assert in_memory[name].dtype is torch.float32
        assert torch.equal(value, in_memory[name].to(written))  # to nearest
    assert json.loads((tmp_path / "model" / "config.json").read_text())["dtype"] == str(written).removeprefix("torch.")
    assert next(GPT2LMHeadModel.from_pretrained(tmp_path / "model").parameters()).dtype is written
    checkpoint = load_file(tmp_path / "checkpoint-2" / "model.safetensors")
    assert {value.dtype for value in checkpoint.values()} == {torch.float32}
    trainer.save_model(_internal_call=True)  # as push_to_hub does before it uploads the folder
    assert {value.dtype for value in load_file(tmp_path / "model.safetensors").values()} == {written}


def test_each_weight_goes_back_to_what_it_was_loaded_in(tmp_path: Path) -> None:
    model = tiny_gpt2(torch.bfloat16)
    for block in model.transformer.h:
        block.ln_1.float()
    trainer = train("callback", "original", tmp_path, model)
    trainer.train()  # the model of a second training is FP32 by then
    trainer.save_model(str(tmp_path / "model"))
    saved = load_file(tmp_path / "model" / "model.safetensors")
    assert {name for name, value in saved.items() if value.dtype is torch.float32} == {
        "transformer.h.0.ln_1.weight", "transformer.h.0.ln_1.bias"
    }  # fmt: skip
    assert json.loads((tmp_path / "model" / "config.json").read_text())["dtype"] == "bfloat16"


def test_without_the_callback_a_model_is_saved_as_it_is(tmp_path: Path) -> None:
    trainer = train("callback", "bf16", tmp_path, tiny_gpt2())
    trainer.remove_callback(MixedPrecisionCallback)
    trainer.save_model(str(tmp_path / "model"))
    assert {value.dtype for value in load_file(tmp_path / "model" / "model.safetensors").values()} == {torch.float32}


def test_the_contract_says_what_will_be_saved(tmp_path: Path) -> None:
    trainer = train("subclass", "bf16", tmp_path, tiny_gpt2())
    assert {(row.stored, row.saved) for row in trainer.session.contract.rows} == {("fp32", "bf16")}


@pytest.mark.parametrize(("save_dtype", "written"), [("original", torch.float32), ("bf16", torch.bfloat16)])
def test_adapters_are_cast_too(save_dtype, written, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True)
    model = peft.get_peft_model(tiny_gpt2(torch.bfloat16), config)  # which makes adapters in FP32
    train("callback", save_dtype, tmp_path, model).save_model(str(tmp_path / "adapter"))
    saved = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert saved and {value.dtype for value in saved.values()} == {written}
    assert not (tmp_path / "adapter" / "config.json").exists()


def test_what_fp16_does_not_hold_is_refused(tmp_path: Path) -> None:
    trainer = train("subclass", "fp16", tmp_path, tiny_gpt2())
    with torch.no_grad():
        trainer.model.transformer.ln_f.weight[0] = 1e6
    with pytest.raises(ValueError, match=r"ln_f.weight has values up to 1e\+06.* save in 'bf16' or 'fp32'"):
        trainer.save_model(str(tmp_path / "model"))
    with pytest.raises(ValueError, match=r"save_dtype='fp8': choose one of fp32"):
        MixedPrecisionCallback("bf16", save_dtype="fp8")
