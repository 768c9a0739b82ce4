"""The lean layouts: what they add to tests/step/test_loops.py and tests/conformance, from attaching to memory."""

from __future__ import annotations

import copy
import gc
import json
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import PyTorchModelHubMixin
from tiny import Using, assert_true, attached, copies, same, take_step
from torch import Tensor, nn
from torch.optim import SGD, AdamW
from trainer_runs import arguments, logged, make_trainer, tiny_gpt2, token_rows
from transformers import GPT2LMHeadModel

import hf_mp
from hf_mp import DynamicLossScaler, MasterWeightOptimizer
from hf_mp.policy import PrecisionPolicy
from hf_mp.step.mixed_precision import MixedPrecision
from hf_mp.weights.split_layout import SplitLayout, restore_parameters, split_trainable_parameters
from hf_mp.weights.split_parameter import SplitParameter, gradient_and_factor, master_value

every_lean = pytest.mark.parametrize("precision", ["fp16-lean", "bf16-lean"])
Batch = dict[str, Tensor]


def masters(model: nn.Module) -> list[Tensor]:
    return copies(master_value(p) if isinstance(p, SplitParameter) else p for p in model.parameters())


def test_two_optimizers_of_one_model_see_gradients_of_one_scale(gpt2: GPT2LMHeadModel, batch: Batch) -> None:
    """The first optimizer's step changes the loss scale; gradients that wait for the second keep theirs."""
    start, updates = masters(gpt2), []
    for precision in ("fp32", "fp16-lean"):
        model, runtime = copy.deepcopy(gpt2), MixedPrecision(precision)
        parameters = list(runtime.attach(model).parameters())
        optimizers = [runtime.attach_optimizer(SGD(part, lr=0.5)) for part in (parameters[:5], parameters[5:])]
        model(**batch).loss.backward()
        before = runtime.scaler.get_scale()
        optimizers[0].step()
        assert precision == "fp32" or runtime.scaler.get_scale() != before
        optimizers[1].step()
        updates.append([now - then for now, then in zip(masters(model), start, strict=True)])
    assert_true(updates[1], updates[0], 5e-3)


def test_two_models_of_one_scaler_have_gradients_of_one_scale() -> None:
    scaler, models = DynamicLossScaler(init_scale=2.0**8, growth_interval=1), [nn.Linear(8, 8), nn.Linear(8, 8)]
    optimizers: list[Any] = [SGD(model.parameters(), lr=1.0) for model in models]
    for number, model in enumerate(models):
        runtime = MixedPrecision("fp16-lean", loss_scaler=scaler)
        runtime.attach(model)
        optimizers[number] = runtime.attach_optimizer(optimizers[number])
    start = masters(models[1])
    for model in models:
        model(torch.ones(2, 8)).mean().backward()
    for optimizer in optimizers:
        optimizer.step()
    assert scaler.get_scale() == 2.0**9  # it grows once between two backwards
    assert torch.allclose(masters(models[1])[0] - start[0], torch.tensor(-1 / 8), rtol=1e-3)


# Attaching and detaching


@every_lean
def test_attaching_and_detaching_keeps_every_bit(gpt2: GPT2LMHeadModel, precision: str) -> None:
    before, runtime = masters(gpt2), MixedPrecision(precision)
    assert runtime.attach(gpt2).dtype is runtime.policy.params
    split = masters(gpt2)
    for value, original in zip(split, before, strict=True):
        error = (value - original).abs()
        assert error.max() <= (0 if precision == "bf16-lean" else 2.0**-39)
        assert not error[original.abs() >= 2.0**-16].any()
    runtime.detach()
    assert same(masters(gpt2), split)
    assert "save_pretrained" not in vars(gpt2) and not any(module._state_dict_hooks for module in gpt2.modules())


def test_training_goes_on_in_fp32_after_detach(gpt2: GPT2LMHeadModel, batch: Batch) -> None:
    runtime = MixedPrecision("fp16-lean")
    optimizer = runtime.attach_optimizer(AdamW(runtime.attach(gpt2).parameters(), lr=1e-3))
    take_step(gpt2(**batch).loss, optimizer)
    gpt2(**batch).loss.backward()
    runtime.detach()
    assert gpt2.lm_head.weight.grad is not None
    before = masters(gpt2)
    optimizer.step()
    assert not same(before, masters(gpt2))
    assert all(p.dtype is torch.float32 for p in gpt2.parameters())


def test_a_model_that_cannot_be_split_is_left_as_it_was() -> None:
    class Own(nn.Parameter):
        pass

    model, layout = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), SplitLayout(PrecisionPolicy.parse("fp16-lean"))
    model[1].bias = Own(torch.zeros(2))
    with pytest.raises(TypeError, match=r"a Own of shape \(2,\) cannot be split .* freeze it, or use the default lay"):
        split_trainable_parameters(model, layout.split)
    assert all(p.dtype is torch.float32 for p in model.parameters())
    model[1].bias.requires_grad_(False)
    split_trainable_parameters(model, layout.split)
    assert isinstance(model[0].weight, SplitParameter) and model[1].bias.dtype is torch.float32
    restore_parameters(model)


@every_lean
def test_complex_parameters_are_trained_as_they_are(precision: str) -> None:
    def losses(precision: str) -> list[float]:
        torch.manual_seed(0)
        model: Any = Using(
            lambda model, x: (model.layer(x).to(torch.complex64) @ model.weight).abs().square().mean(),
            layer=nn.Linear(8, 8), weight=nn.Parameter(torch.randn(8, 8, dtype=torch.complex64)),
        )  # fmt: skip
        model, optimizer = hf_mp.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01), precision)
        found = [take_step(model(x), optimizer, clip=1.0) for _ in range(4)]
        assert model.weight.dtype is torch.complex64 and not isinstance(model.weight, SplitParameter)
        return found

    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))
    assert losses(precision) == pytest.approx(losses("fp32"), rel=2e-2)


def test_buffers_in_lower_precision_become_fp32() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).half()
    MixedPrecision("fp16-lean").attach(model)
    assert {value.dtype for value in model[1].state_dict().values() if value.is_floating_point()} == {torch.float32}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@every_lean
def test_batch_normalization_trains_with_weights_in_fp32(precision: str, dtype: torch.dtype) -> None:
    def train(precision: str) -> Any:
        torch.manual_seed(1)
        model: Any = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 2)).to(dtype)
        model, optimizer = hf_mp.prepare(model, SGD(model.parameters(), lr=0.1), precision)
        for seed in range(3):
            x = torch.randn(4, 2, 8, 8, generator=torch.Generator().manual_seed(seed))
            take_step((model(x) - 1.0).square().mean(), optimizer)
        return model

    lean, default = train(precision), train(precision.removesuffix("-lean"))
    assert lean[1].weight.dtype is torch.float32 and isinstance(lean[0].weight, SplitParameter)
    torch.testing.assert_close(dict(lean.state_dict()), dict(default.state_dict()), rtol=2e-2, atol=5e-3)


def test_gradients_of_batch_normalization_are_not_freed_in_backward() -> None:
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    hf_mp.prepare(model, SGD(model.parameters(), lr=0.1), "fp16-lean", free_gradients="backward")
    with pytest.raises(ValueError, match=r"weights of normalizations .* are FP32: use free_gradients='step'"):
        model(torch.ones(3, 4))
    model[1].requires_grad_(False)
    model(torch.ones(3, 4)).sum().backward()


def test_lora(gpt2: GPT2LMHeadModel, batch: Batch, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM")
    reference = copy.deepcopy(gpt2)
    torch.manual_seed(1)
    model = peft.get_peft_model(gpt2, config)
    trained = [p for p in model.parameters() if p.requires_grad]
    model, optimizer = hf_mp.prepare(model, AdamW(trained, 1e-2), "fp16-lean")
    adapters = {n for n, p in model.named_parameters() if isinstance(p, SplitParameter)}
    assert adapters and all("lora_" in name for name in adapters)
    curve = [take_step(model(**batch).loss, optimizer) for _ in range(8)]
    assert curve[-1] < curve[0] - 0.01
    model.save_pretrained(tmp_path)
    assert not (tmp_path / "config.json").exists()  # an adapter has none
    loaded = peft.PeftModel.from_pretrained(reference, tmp_path)
    assert same(map(master_value, trained), [p for n, p in loaded.named_parameters() if "lora_" in n])


class FrozenDict(OrderedDict[str, Any]):
    """As that of diffusers, the config of its models: no attribute can be set."""

    def __setattr__(self, name: str, value: Any) -> None:
        raise TypeError(f"cannot set {name}")


class OfTheHub(nn.Linear, PyTorchModelHubMixin):
    """A model with a dictionary as its config, which its own save_pretrained writes."""

    def __init__(self, width: int = 4) -> None:
        super().__init__(width, width)
        self.config: Any = {"width": width}


@pytest.mark.parametrize("config", [{"width": 4}, FrozenDict(width=4), None], ids=["dict", "FrozenDict", "none"])
def test_a_model_with_a_dictionary_as_its_config_is_saved_while_attached(tmp_path: Path, config: Any) -> None:
    model = OfTheHub()
    model.config = config
    model, optimizer = hf_mp.prepare(model, AdamW(model.parameters(), 1e-2), "fp16-lean")
    take_step(model(torch.ones(2, 4)).square().mean(), optimizer)
    model.save_pretrained(tmp_path)
    loaded = OfTheHub.from_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text()) == {"width": 4}
    assert loaded.weight.dtype is torch.float32 and torch.equal(loaded.weight, master_value(model.weight))
    assert not torch.equal(loaded.weight, loaded.weight.half().float())


def test_a_static_scale_of_one_leaves_gradients_unscaled(gpt2: GPT2LMHeadModel, batch: Batch) -> None:
    attached(gpt2, "fp16-lean", 1.0)
    gpt2(**batch).loss.backward()
    raw = gradient_and_factor(gpt2.lm_head.weight)[0]
    assert raw is not None and torch.equal(raw.float(), gpt2.lm_head.weight.grad)  # type: ignore[arg-type]


# Memory


def live_bytes(tensors: list[Tensor]) -> int:
    """Bytes of the memory that ``tensors`` refer to, each block once."""
    blocks = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(blocks.values())


def tensors_alive() -> list[Tensor]:
    """All tensors that Python knows; of what C++ alone refers to (``.grad``) it does not."""
    gc.collect()
    return [thing for thing in gc.get_objects() if issubclass(type(thing), Tensor)]


def adamw_in_8_bits(parameters: Any) -> Any:
    return pytest.importorskip("bitsandbytes").optim.AdamW8bit(parameters, lr=1e-3, min_8bit_size=64)


@pytest.mark.parametrize(
    ("precision", "make", "bytes_per_parameter"),
    [
        ("fp16", AdamW, 18),
        ("bf16-lean", AdamW, 14),
        ("fp16-lean", adamw_in_8_bits, 8),
    ],
)
def test_bytes_per_parameter(
    precision: str, make: Callable[[Any], Any], bytes_per_parameter: int, request: pytest.FixtureRequest
) -> None:
    gc.collect()
    gc.freeze()  # what there was before is not found below
    request.addfinalizer(gc.unfreeze)
    model: Any = nn.Sequential(*[nn.Linear(512, 512, bias=False) for _ in range(6)])
    parameters = sum(p.numel() for p in model.parameters())
    model, optimizer = hf_mp.prepare(model, make(model.parameters()), precision)
    x = torch.randn(2, 512)
    for _ in range(2):
        take_step(model(x).square().mean(), optimizer)
    after_step = live_bytes(tensors_alive())
    model(x).square().mean().backward()
    gradients = [gradient_and_factor(p)[0] for p in model.parameters()]
    lean = precision.endswith("lean")
    found = tensors_alive()
    at_update = live_bytes([*found, *[gradient for gradient in gradients if gradient is not None]])
    assert at_update / parameters == pytest.approx(bytes_per_parameter, rel=0.03)
    assert after_step / parameters == pytest.approx(bytes_per_parameter - (2 if lean else 4), rel=0.04)
    del gradients, found
    optimizer.step()
    if lean:
        assert all(gradient_and_factor(p)[0] is None for p in model.parameters())  # freed without zero_grad


# The Trainer


@pytest.mark.parametrize(("precision", "max_grad_norm"), [("fp16-lean", 1.0), ("bf16-lean", 0.0)])
@pytest.mark.usefixtures("without_first_check")
def test_8_bit_states_through_the_trainer(tmp_path: Path, precision: str, max_grad_norm: float) -> None:
    pytest.importorskip("bitsandbytes")
    settings = {"optim": "adamw_bnb_8bit", "max_steps": 10, "learning_rate": 1e-3, "max_grad_norm": max_grad_norm}
    runs = [
        make_trainer(
            "subclass", name, tiny_gpt2(n_embd=64), arguments(tmp_path, **settings), train_dataset=token_rows(64)
        )
        for name in ("fp32", precision)
    ]
    for trainer in runs:
        trainer.train()
    curves = [logged(trainer, "loss") for trainer in runs]
    assert curves[0][-1] < curves[0][0] - 0.03
    assert curves[1] == pytest.approx(curves[0], rel=1e-3 if precision == "fp16-lean" else 1e-2)
    assert all(norm > 0 for norm in logged(runs[1], "grad_norm"))
    model: Any = runs[1].model
    wrapper = runs[1].optimizer.optimizer  # type: ignore[union-attr]
    assert isinstance(wrapper, MasterWeightOptimizer)
    assert wrapper.state[model.transformer.h[0].mlp.c_fc.weight]["state1"].dtype is torch.uint8
    assert wrapper.state[model.transformer.wte.weight]["state1"].dtype is torch.float32  # the Trainer's override
    assert all(gradient_and_factor(p)[0] is None for p in model.parameters())


@every_lean
def test_a_part_that_is_saved_by_itself_is_loaded_in_fp32(
    gpt2: GPT2LMHeadModel, precision: str, tmp_path: Path
) -> None:
    runtime = MixedPrecision(precision)
    runtime.attach(gpt2)
    gpt2.transformer.save_pretrained(tmp_path)
    loaded: Any = type(gpt2.transformer).from_pretrained(tmp_path)
    assert loaded.dtype is torch.float32
    assert torch.equal(loaded.wte.weight, gpt2.state_dict()["transformer.wte.weight"])
    with pytest.raises(ValueError, match=r"call model\.push_to_hub"):
        gpt2.save_pretrained(tmp_path, push_to_hub=True)
    runtime.detach()
    assert not any("save_pretrained" in vars(module) for module in gpt2.modules())
