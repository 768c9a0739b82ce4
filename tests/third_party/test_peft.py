"""LoRA adapters of peft over FP32, FP16 and bitsandbytes INT8 bases: masters only for what trains."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import Dispatched, saved_tensors
from torch import nn
from trainer_runs import (
    arguments,
    difference,
    make_trainer,
    same,
    tiny_gpt2,
    token_rows,
)
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

import hf_mp
from hf_mp import MixedPrecisionCallback
from hf_mp.models.adapters import AdapterInputs

peft = pytest.importorskip("peft")

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "int8": torch.float16, "nf4": torch.float32}
BASES = tuple(DTYPES)
QUANTIZED = {"int8": {"load_in_8bit": True}, "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}}
STORED = {"int8": torch.int8, "nf4": torch.uint8}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    model = tiny_gpt2(torch.float16, n_embd=64, n_layer=2, n_head=4)
    model.float().save_pretrained(path)  # FP16 holds these weights exactly
    return path


def base_model(saved: Path, base: str) -> Any:
    quantization: dict[str, Any] = {}
    if base in QUANTIZED:
        pytest.importorskip("bitsandbytes")
        quantization = {"quantization_config": BitsAndBytesConfig(**QUANTIZED[base])}
    return AutoModelForCausalLM.from_pretrained(saved, dtype=DTYPES[base], **quantization)


def with_adapter(saved: Path, base: str, **settings: Any) -> nn.Module:
    model = base_model(saved, base)
    torch.manual_seed(5)
    config = peft.LoraConfig(
        r=8,
        lora_alpha=16,
        target_modules=["c_attn", "c_proj", "c_fc"],
        fan_in_fan_out=base not in QUANTIZED,
        task_type="CAUSAL_LM",
    )
    return peft.get_peft_model(model, config, **settings)


def trained_weights(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters() if parameter.requires_grad]


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("adapter", ["fp32", "as the base"])
def test_masters_only_for_what_trains(tmp_path: Path, saved: Path, base: str, adapter: str) -> None:
    model = with_adapter(saved, base, autocast_adapter_dtype=adapter == "fp32")
    # Not the biases: bitsandbytes casts its own to the dtype of what comes in.
    frozen = [p for p in model.parameters() if not p.requires_grad and p.ndim > 1]
    before = [p.detach().clone() for p in frozen]
    trainer = make_trainer("callback", "fp16", model, arguments(tmp_path), train_dataset=token_rows())
    trainer.train()
    assert {parameter.dtype for parameter in model.parameters() if parameter.requires_grad} == {torch.float32}
    assert {parameter.dtype for parameter in frozen} == {DTYPES[base], STORED.get(base, DTYPES[base])}
    assert same(frozen, before)
    assert not any("forward" in module.__dict__ for module in model.modules() if not hasattr(module, "_hf_hook"))


@pytest.mark.parametrize("base", BASES)
def test_sgd_takes_the_steps_of_the_stock_trainer(tmp_path: Path, saved: Path, base: str) -> None:
    """A wrong factor on the adapter's gradients would show; the reference trains over the same base without us."""
    ends = {}
    for who in ("stock", "callback"):
        kind = "fp32" if who == "stock" and base == "fp16" else base
        model = with_adapter(saved, kind)
        for parameter in model.parameters():
            if parameter.requires_grad:  # peft draws them in the base's dtype
                parameter.data = parameter.data.half().float()
        start = trained_weights(model)
        args = arguments(tmp_path / who, gradient_accumulation_steps=2, max_grad_norm=0.1)
        trainer = make_trainer(who, "fp16", model, args, train_dataset=token_rows())
        trainer.train()
        ends[who] = (trained_weights(trainer.model), start)
    assert same(ends["stock"][1], ends["callback"][1])
    assert difference(ends["callback"][0], *ends["stock"]) < 0.03


def test_the_adapter_alone_is_saved_and_generates(tmp_path: Path, saved: Path) -> None:
    trainer = make_trainer(
        "callback", "fp16", with_adapter(saved, "fp16"), arguments(tmp_path / "run"), train_dataset=token_rows()
    )
    prompt = token_rows(1)[0]["input_ids"][None, :4]
    trainer.model.generate(prompt, max_new_tokens=2, pad_token_id=0)  # while attached
    trainer.train()
    trainer.save_model(str(tmp_path / "adapter"))
    assert (tmp_path / "adapter" / "adapter_model.safetensors").is_file()
    assert not (tmp_path / "adapter" / "model.safetensors").exists()
    loaded = peft.PeftModel.from_pretrained(base_model(saved, "fp32"), tmp_path / "adapter", is_trainable=True)
    assert same(trained_weights(loaded), trained_weights(trainer.model))


def test_an_int8_model_with_an_adapter_for_inference_is_refused(tmp_path: Path, saved: Path) -> None:
    with_adapter(saved, "fp32").save_pretrained(tmp_path / "adapter")
    model = peft.PeftModel.from_pretrained(base_model(saved, "int8"), tmp_path / "adapter")
    with pytest.raises(ValueError, match=r"quantized and has nothing to train.*is_trainable=True"):
        make_trainer("callback", "fp16", model, arguments(tmp_path), train_dataset=token_rows())


def test_an_int8_model_without_adapter_is_refused(tmp_path: Path, saved: Path) -> None:
    model = base_model(saved, "int8")
    with pytest.raises(ValueError, match="purely quantized"):  # by the Trainer, before it asks its callbacks
        make_trainer("callback", "fp16", model, arguments(tmp_path), train_dataset=token_rows())
    model.requires_grad_(False)
    with pytest.raises(ValueError, match="quantized and has nothing to train"):
        MixedPrecisionCallback("fp16").on_init_end(arguments(tmp_path), None, None, model=model)


def adapted_llama(precision: str, base: torch.dtype, config: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 101}
    model = LlamaForCausalLM(LlamaConfig(num_attention_heads=4, num_key_value_heads=4, **sizes)).to(base)
    config.task_type = "CAUSAL_LM"
    model = peft.get_peft_model(model, config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:  # some begin as 0, and their gradients would show nothing
                parameter.add_(0.1 * torch.randn_like(parameter))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    return hf_mp.prepare(model, optimizer, precision)


ADAPTERS = {
    "LoRA": lambda: peft.LoraConfig(target_modules="all-linear"),
    "DoRA": lambda: peft.LoraConfig(target_modules="all-linear", use_dora=True),
    "AdaLoRA": lambda: peft.AdaLoraConfig(target_modules="all-linear", total_step=60),
}


@pytest.mark.usefixtures("nothing_is_small")  # small matmuls of a CPU keep FP32 tensors for backward
@pytest.mark.parametrize("base", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("adapter", ADAPTERS)
def test_inputs_of_adapters_are_cast_once(monkeypatch: pytest.MonkeyPatch, adapter: str, base: torch.dtype) -> None:
    ids = torch.arange(32).reshape(2, 16)
    found: dict[bool, Any] = {}
    for by_peft in (True, False):
        with monkeypatch.context() as patch:
            if by_peft:
                patch.setattr(AdapterInputs, "install", lambda self, model: None)
            model, _ = adapted_llama("bf16", base, ADAPTERS[adapter]())
        model(input_ids=ids, labels=ids).loss.backward()
        model.zero_grad()
        with Dispatched("_to_copy") as casts, saved_tensors() as saved:
            loss = model(input_ids=ids, labels=ids).loss
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in saved}
        loss.backward()
        gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        found[by_peft] = loss.item(), gradients, len(casts.calls), sum(storages.values())
    assert found[True][0] == found[False][0]
    assert same(found[True][1], found[False][1])
    is_saving = adapter != "DoRA" and base is torch.bfloat16
    assert (found[False][2] < found[True][2]) == (adapter != "DoRA")
    assert (found[False][3] < found[True][3]) == is_saving


def test_peft_casts_where_no_autocast_does_and_after_detach() -> None:
    config = ADAPTERS["LoRA"]()
    model, _ = adapted_llama("bf16", torch.bfloat16, config)
    layer = model.base_model.model.model.layers[0].mlp.up_proj
    copied, pickled = copy.deepcopy(model), pickle.loads(pickle.dumps(layer))
    x = torch.ones(1, 32, dtype=torch.bfloat16)
    expected = layer(x)  # outside of a forward
    assert not isinstance(layer.cast_input_dtype_enabled, bool) and pickled.cast_input_dtype_enabled is True
    for one in (model, copied):
        hf_mp.detach(one)
        layer = one.base_model.model.model.layers[0].mlp.up_proj
        assert layer.cast_input_dtype_enabled is True and torch.equal(layer(x), expected)
