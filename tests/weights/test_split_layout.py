"""The lean layouts from end to end: plain loop and Trainer, checkpoints, memory."""

from __future__ import annotations

import copy
import gc
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW
from trainer_runs import quick_arguments, token_rows
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

import hf_mp
from hf_mp import MasterWeightOptimizer, MixedPrecisionArguments, MixedPrecisionTrainer
from hf_mp.scaling.scalers import StaticLossScaler
from hf_mp.step.mixed_precision import MixedPrecision
from hf_mp.trainer.session import STATE_NAME
from hf_mp.weights.lean.split_model import restore_parameters, split_trainable_parameters
from hf_mp.weights.lean.split_parameter import SplitParameter, master_value, raw_gradient

pytestmark = pytest.mark.usefixtures("without_first_check")

LEAN = ["fp16-lean", "bf16-lean"]
LOSS_TOLERANCE = {"fp16-lean": 1e-3, "bf16-lean": 1e-2}  # FP16 has 11 significant bits, BF16 8
every_lean = pytest.mark.parametrize("precision", LEAN)
Rows = list[dict[str, Tensor]]
Batch = dict[str, Tensor]


@pytest.fixture
def rows() -> Rows:
    return token_rows(64)


def arguments(path: Path, cls: type[TrainingArguments] = MixedPrecisionArguments, **settings: Any) -> Any:
    return quick_arguments(path / "run", cls, **{"max_steps": 6, "learning_rate": 1e-3, **settings})


def model_of(config: GPT2Config) -> GPT2LMHeadModel:
    torch.manual_seed(3)
    return GPT2LMHeadModel(config)


def masters(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: master_value(p).clone() if isinstance(p, SplitParameter) else p.detach().clone()
        for name, p in model.named_parameters()
    }


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[key], right[key]) for key in left)


def losses(trainer: Trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def deep(state: Any) -> Any:
    """Tensors in a nested state as bytes, so that ``==`` compares bits."""
    if isinstance(state, Tensor):
        return (
            state.dtype,
            state.shape,
            state.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes(),
        )
    if isinstance(state, dict):
        return {key: deep(value) for key, value in state.items()}
    return [deep(item) for item in state] if isinstance(state, (list, tuple)) else state


class PoisonedTrainer(MixedPrecisionTrainer):
    poisoned: tuple[int, ...] = ()

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(*args, **kwargs)
        return loss * math.inf if self.state.global_step in self.poisoned and self.model.training else loss


# The plain loop


@every_lean
@pytest.mark.parametrize("make", [lambda p: SGD(p, lr=0.3), lambda p: AdamW(p, lr=1e-3)], ids=["SGD", "AdamW"])
def test_the_plain_loop_follows_fp32(
    gpt2: GPT2LMHeadModel, batch: Batch, precision: str, make: Callable[[Any], Any]
) -> None:
    reference = copy.deepcopy(gpt2)
    curves: dict[str, list[float]] = {}
    for name, model in (("fp32", reference), (precision, gpt2)):
        model, optimizer = hf_mp.prepare(model, make(model.parameters()), precision=name)
        curves[name] = []
        for _ in range(15):
            loss = model(**batch).loss
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            curves[name].append(loss.item())
    assert isinstance(optimizer, MasterWeightOptimizer)
    assert all(p.dtype is hf_mp.PrecisionPolicy.parse(precision).params for p in gpt2.parameters())
    assert curves["fp32"][-1] < curves["fp32"][0] - 0.3
    assert curves[precision] == pytest.approx(curves["fp32"], rel=LOSS_TOLERANCE[precision])


@every_lean
def test_small_updates_are_lost_without_masters(gpt2_config: GPT2Config, batch: Batch, precision: str) -> None:
    """LayerNorm's weights start at 1.0 and move by 1e-5 a step: less than half a unit in the last place."""
    moved = {}
    for name in ("fp32", precision, "without"):
        model = model_of(gpt2_config)
        optimizer: Any = AdamW(model.parameters(), lr=1e-5, weight_decay=0.0)
        if name == "without":
            model.bfloat16()  # FP16 products are slow on a CPU; FP16's are as lost
        model, optimizer = hf_mp.prepare(model, optimizer, "fp32" if name == "without" else name)
        for _ in range(10):
            model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        moved[name] = masters(model)["transformer.ln_f.weight"].float()
    assert torch.equal(moved["without"], torch.ones(64))
    assert (moved["fp32"] - 1).abs().mean() > 5e-5
    assert (moved[precision] - moved["fp32"]).abs().mean() < 0.2 * (moved["fp32"] - 1).abs().mean()


@every_lean
def test_a_skipped_step_is_invisible(gpt2: GPT2LMHeadModel, batch: Batch, precision: str) -> None:
    model, optimizer = hf_mp.prepare(gpt2, AdamW(gpt2.parameters(), lr=1e-2), precision)

    def step(factor: float = 1.0) -> None:
        (model(**batch).loss * factor).backward()
        optimizer.clip_grad_norm_(1.0)  # type: ignore[attr-defined]
        optimizer.step()
        optimizer.zero_grad()

    step()
    before, state = masters(model), deep(optimizer.state_dict())
    working = [p.detach().clone() for p in model.parameters()]
    step(math.inf)
    runtime: MixedPrecision = model.forward.runtime
    assert runtime.stats.skipped_steps == 1
    assert same(before, masters(model)) and deep(optimizer.state_dict()) == state
    assert all(torch.equal(a, b) for a, b in zip(working, model.parameters(), strict=True))
    copied, other = copy.deepcopy((model, optimizer))
    step()
    assert not same(before, masters(model))
    # Nothing of the skipped step's clipping was left: the step after is the one of an optimizer that never clipped.
    other_runtime: MixedPrecision = copied.forward.runtime
    other_runtime.attach_optimizer(other)
    copied(**batch).loss.backward()
    nn.utils.clip_grad_norm_(copied.parameters(), 1.0)
    other.step()
    for name, value in masters(model).items():
        torch.testing.assert_close(masters(copied)[name], value, rtol=1e-5, atol=1e-5)


def test_two_optimizers_of_one_model_see_gradients_of_one_scale(gpt2_config: GPT2Config, batch: Batch) -> None:
    """The first optimizer's step changes the loss scale; gradients that wait for the second keep theirs."""
    results = []
    for precision in ("fp32", "fp16-lean"):
        model = model_of(gpt2_config)
        parameters = list(model.parameters())
        runtime = MixedPrecision(precision)
        runtime.attach(model)
        optimizers = [runtime.attach_optimizer(SGD(part, lr=0.5)) for part in (parameters[:5], parameters[5:])]
        model(**batch).loss.backward()
        before = runtime.scaler.get_scale()
        optimizers[0].step()
        assert precision == "fp32" or runtime.scaler.get_scale() != before
        optimizers[1].step()
        results.append(masters(model))
    start = masters(model_of(gpt2_config))
    for name, expected in results[0].items():
        update = expected - start[name]
        assert ((results[1][name] - start[name]) - update).norm() < 5e-3 * update.norm() + 1e-6, name


@every_lean
def test_gradient_accumulation_and_a_penalty_outside(gpt2: GPT2LMHeadModel, batch: Batch, precision: str) -> None:
    reference = copy.deepcopy(gpt2)
    for name, model in (("fp32", reference), (precision, gpt2)):
        model, optimizer = hf_mp.prepare(model, SGD(model.parameters(), lr=0.5), name)
        for rows in (slice(0, 2), slice(2, 4)):
            loss = model(**{key: value[rows] for key, value in batch.items()}).loss / 2
            (loss + 0.01 * sum(p.float().square().sum() for p in model.parameters())).backward()
        optimizer.step()
    for (name, ours), theirs in zip(masters(gpt2).items(), masters(reference).values(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=4e-3 if precision == "bf16-lean" else 1e-3, msg=name)


def test_gradient_checkpointing(gpt2_config: GPT2Config, batch: Batch) -> None:
    gradients = []
    for checkpointing in (False, True):
        model = model_of(gpt2_config).train()
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        MixedPrecision("fp16-lean").attach(model)
        model(**batch).loss.backward()
        assert all(raw_gradient(p) is not None for p in model.parameters())
        gradients.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))  # type: ignore[arg-type]


# Attaching and detaching


@every_lean
def test_attaching_and_detaching_keeps_every_bit(gpt2: GPT2LMHeadModel, precision: str) -> None:
    before, own = masters(gpt2), set(vars(gpt2))
    runtime = MixedPrecision(precision)
    runtime.attach(gpt2)
    assert gpt2.dtype is runtime.policy.params
    attached = masters(gpt2)
    for name, value in attached.items():
        error = (value - before[name]).abs()
        assert error.max() <= (0 if precision == "bf16-lean" else 2.0**-39)
        assert not error[before[name].abs() >= 2.0**-16].any()
    runtime.detach()
    assert same(masters(gpt2), attached)
    assert all(type(p) is nn.Parameter and not vars(p) for p in gpt2.parameters())
    assert set(vars(gpt2)) == own and "forward" not in vars(gpt2) and "save_pretrained" not in vars(gpt2)
    assert not any(module._state_dict_hooks for module in gpt2.modules())
    optimizer = AdamW(gpt2.parameters())
    gpt2(input_ids=torch.tensor([[1, 2]]), labels=torch.tensor([[1, 2]])).loss.backward()
    optimizer.step()
    assert all(p.grad is not None and p.grad.dtype is torch.float32 for p in gpt2.parameters())


def test_training_goes_on_in_fp32_after_detach(gpt2: GPT2LMHeadModel, batch: Batch) -> None:
    runtime = MixedPrecision("fp16-lean")
    runtime.attach(gpt2)
    optimizer = runtime.attach_optimizer(AdamW(gpt2.parameters(), lr=1e-3))
    gpt2(**batch).loss.backward()
    optimizer.step()
    gpt2(**batch).loss.backward()
    gradient = raw_gradient(gpt2.lm_head.weight)
    runtime.detach()
    assert gradient is not None and gpt2.lm_head.weight.grad is not None
    before = masters(gpt2)
    optimizer.step()
    assert not same(before, masters(gpt2))
    assert all(p.dtype is torch.float32 for p in gpt2.parameters())


def test_a_model_that_cannot_be_split_is_left_as_it_was() -> None:
    class Own(nn.Parameter):
        pass

    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].bias = Own(torch.zeros(2))
    with pytest.raises(TypeError, match=r"a Own of shape .* cannot be split .* freeze it, or use the default layout"):
        split_trainable_parameters(model, torch.float16)
    assert all(p.dtype is torch.float32 for p in model.parameters())
    model[1].bias.requires_grad_(False)
    split_trainable_parameters(model, torch.float16)
    assert isinstance(model[0].weight, SplitParameter) and model[1].bias.dtype is torch.float32
    restore_parameters(model)


def test_buffers_in_lower_precision_become_fp32() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).half()
    MixedPrecision("fp16-lean").attach(model)
    assert {value.dtype for value in model[1].state_dict().values() if value.is_floating_point()} == {torch.float32}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@every_lean
def test_batch_normalization_trains_with_weights_in_fp32(precision: str, dtype: torch.dtype) -> None:
    def train(precision: str) -> nn.Module:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 2)).to(dtype)
        model, optimizer = hf_mp.prepare(model, SGD(model.parameters(), lr=0.1), precision)
        for seed in range(3):
            x = torch.randn(4, 2, 8, 8, generator=torch.Generator().manual_seed(seed))
            (model(x) - 1.0).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return model

    lean, default = train(precision), train(precision.removesuffix("-lean"))
    assert lean[1].weight.dtype is torch.float32 and isinstance(lean[0].weight, SplitParameter)
    expected = default.state_dict()
    for name, value in lean.state_dict().items():
        torch.testing.assert_close(value, expected[name], rtol=2e-2, atol=5e-3)


def test_gradients_of_batch_normalization_are_not_freed_in_backward() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    optimizer = SGD(model.parameters(), lr=0.1)
    model, optimizer = hf_mp.prepare(model, optimizer, "fp16-lean", free_gradients="backward")
    with pytest.raises(ValueError, match=r"weights of normalizations .* are FP32: use free_gradients='step'"):
        model(torch.ones(3, 4))
    model[1].requires_grad_(False)
    model(torch.ones(3, 4)).sum().backward()


def test_unfreezing_a_layer_while_training(gpt2: GPT2LMHeadModel, batch: Batch) -> None:
    block = gpt2.transformer.h[0]
    block.requires_grad_(False)
    model, optimizer = hf_mp.prepare(gpt2, AdamW(gpt2.parameters(), lr=1e-3), "fp16-lean")
    frozen = masters(block)
    assert all(type(p) is nn.Parameter for p in block.parameters())

    def step() -> None:
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    assert same(frozen, masters(block))
    block.requires_grad_(True)
    step()
    assert all(isinstance(p, SplitParameter) and p.dtype is torch.float16 for p in block.parameters())
    assert not any(torch.equal(frozen[name], value) for name, value in masters(block).items() if "c_attn" not in name)
    assert all(value.dtype is torch.float32 for value in model.state_dict().values())


@every_lean
def test_evaluation_and_generation(gpt2: GPT2LMHeadModel, batch: Batch, precision: str) -> None:
    gpt2.eval()
    expected = gpt2(**batch).loss.item()
    tokens = gpt2.generate(batch["input_ids"][:, :4], max_new_tokens=6, do_sample=False)
    MixedPrecision(precision).attach(gpt2)
    before = masters(gpt2)
    with torch.no_grad():
        assert gpt2(**batch).loss.item() == pytest.approx(expected, rel=LOSS_TOLERANCE[precision])
    with torch.inference_mode():
        gpt2(**batch)
    assert gpt2.generate(batch["input_ids"][:, :4], max_new_tokens=6, do_sample=False).shape == tokens.shape
    assert same(before, masters(gpt2))
    gpt2.train()
    gpt2(**batch).loss.backward()


def test_resized_embeddings_train(gpt2: GPT2LMHeadModel, batch: Batch) -> None:
    runtime = MixedPrecision("fp16-lean")
    runtime.attach(gpt2)
    old = masters(gpt2)["transformer.wte.weight"]
    gpt2.resize_token_embeddings(205)
    optimizer = runtime.attach_optimizer(SGD(gpt2.parameters(), lr=0.1))
    assert gpt2.lm_head.weight is gpt2.transformer.wte.weight
    for _ in range(2):
        gpt2(**batch).loss.backward()
        optimizer.step()
    new = gpt2.state_dict()["transformer.wte.weight"]
    assert new.dtype is torch.float32 and new.shape == (205, 64)
    assert (new[:199] - old).abs().max() < 0.05 and not torch.equal(new, new.half().float())


def test_lora(gpt2: GPT2LMHeadModel, batch: Batch, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM")
    reference = copy.deepcopy(gpt2)
    torch.manual_seed(1)
    model = peft.get_peft_model(gpt2, config)
    model, optimizer = hf_mp.prepare(
        model, AdamW([p for p in model.parameters() if p.requires_grad], 1e-2), "fp16-lean"
    )
    adapters = {n for n, p in model.named_parameters() if isinstance(p, SplitParameter)}
    assert adapters and all("lora_" in name for name in adapters)
    curve = []
    for _ in range(8):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        curve.append(loss.item())
    assert curve[-1] < curve[0] - 0.01
    model.save_pretrained(tmp_path)
    assert not (tmp_path / "config.json").exists()  # an adapter has none
    loaded = peft.PeftModel.from_pretrained(reference, tmp_path)
    ours = {name: value for name, value in masters(model).items() if "lora_" in name}
    theirs = {name: value for name, value in masters(loaded).items() if "lora_" in name}
    assert same(ours, theirs)


class Compiled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.linear, self.norm = nn.Embedding(10, 16), nn.Linear(16, 16), nn.LayerNorm(16)
        self.weight = nn.Parameter(torch.randn(16, 16))

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(self.embed(x))) @ self.weight


@every_lean
def test_compiled(precision: str) -> None:
    torch._dynamo.reset()
    original, weights = Compiled(), []
    for compiled in (False, True):
        model = copy.deepcopy(original)
        runtime = MixedPrecision(precision)
        runtime.attach(model)
        run = torch.compile(model, backend="aot_eager") if compiled else model
        optimizer = runtime.attach_optimizer(SGD(model.parameters(), lr=1e5))
        for _ in range(3):
            # Without a scale most gradients would be less than FP16's smallest number.
            (run(torch.arange(5)).square().mean() * 2.0**-20).backward()
            optimizer.step()
            optimizer.zero_grad()
        weights.append(masters(model))
    before = masters(original)
    for name, eager in weights[0].items():
        moved = (eager - before[name]).norm()
        assert moved > 0 and (weights[1][name] - eager).norm() < (1e-3 if precision == "fp16-lean" else 2e-2) * moved


# Memory


def live_bytes(tensors: list[Tensor]) -> int:
    """Bytes of the memory that ``tensors`` refer to, each block once."""
    blocks = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(blocks.values())


def tensors_alive() -> list[Tensor]:
    """All tensors that Python knows; of what C++ alone refers to (``.grad``) it does not."""
    gc.collect()
    return [thing for thing in gc.get_objects() if issubclass(type(thing), Tensor)]


def optimizer_of(name: str) -> Callable[[Any], Any]:
    if name == "AdamW":
        return lambda p: AdamW(p, lr=1e-3)
    bnb = pytest.importorskip("bitsandbytes")
    return lambda p: bnb.optim.AdamW8bit(p, lr=1e-3, min_8bit_size=64)


@pytest.mark.parametrize(
    ("precision", "optimizer_name", "bytes_per_parameter"),
    [
        ("fp16", "AdamW", 18),
        ("bf16", "AdamW", 18),
        ("fp16-lean", "AdamW", 14),
        ("bf16-lean", "AdamW", 14),
        ("fp16-lean", "adamw_bnb_8bit", 8),
        ("bf16-lean", "adamw_bnb_8bit", 8),
    ],
)
def test_bytes_per_parameter(
    precision: str, optimizer_name: str, bytes_per_parameter: int, request: pytest.FixtureRequest
) -> None:
    gc.collect()
    gc.freeze()  # what there was before is not found below
    request.addfinalizer(gc.unfreeze)
    model: Any = nn.Sequential(*[nn.Linear(512, 512, bias=False) for _ in range(6)])
    parameters = sum(p.numel() for p in model.parameters())
    model, optimizer = hf_mp.prepare(model, optimizer_of(optimizer_name)(model.parameters()), precision)
    x = torch.randn(2, 512)
    for _ in range(2):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    after_step = live_bytes(tensors_alive())
    model(x).square().mean().backward()
    gradients = [raw_gradient(p) for p in model.parameters()]
    lean = precision.endswith("lean")
    found = tensors_alive()
    at_update = live_bytes([*found, *[gradient for gradient in gradients if gradient is not None]])
    assert at_update / parameters == pytest.approx(bytes_per_parameter, rel=0.03)
    assert after_step / parameters == pytest.approx(bytes_per_parameter - (2 if lean else 4), rel=0.04)
    del gradients, found
    optimizer.step()
    if lean:
        assert all(raw_gradient(p) is None for p in model.parameters())  # freed without zero_grad


# The Trainer


def test_training_follows_fp32(tmp_path: Path, gpt2_config: GPT2Config, rows: Rows) -> None:
    runs = {}
    for name in ("fp32", *LEAN):
        # SGD notices a wrong factor on the gradients; AdamW hardly does.
        args = arguments(
            tmp_path,
            precision=name,
            optim="sgd",
            learning_rate=0.5,
            max_steps=12,
            max_grad_norm=0.5,
            gradient_accumulation_steps=2,
        )
        runs[name] = MixedPrecisionTrainer(model_of(gpt2_config), args, train_dataset=rows)
        runs[name].train()
    reference = losses(runs["fp32"])
    assert sum(reference[-4:]) < sum(reference[:4]) - 0.1
    norms = [entry["grad_norm"] for entry in runs["fp32"].state.log_history if "grad_norm" in entry]
    for name in LEAN:
        assert losses(runs[name]) == pytest.approx(reference, rel=LOSS_TOLERANCE[name])
        ours = [entry["grad_norm"] for entry in runs[name].state.log_history if "grad_norm" in entry]
        assert ours == pytest.approx(norms, rel=20 * LOSS_TOLERANCE[name])


@every_lean
@pytest.mark.parametrize("max_grad_norm", [1.0, 0.0])
def test_8_bit_states_through_the_trainer(
    tmp_path: Path, gpt2_config: GPT2Config, rows: Rows, precision: str, max_grad_norm: float
) -> None:
    pytest.importorskip("bitsandbytes")
    curves = []
    for name in ("fp32", precision):
        args = arguments(tmp_path, precision=name, optim="adamw_bnb_8bit", max_steps=10, max_grad_norm=max_grad_norm)
        trainer = MixedPrecisionTrainer(model_of(gpt2_config), args, train_dataset=rows, eval_dataset=rows)
        before = trainer.evaluate()["eval_loss"]
        trainer.train()
        assert trainer.evaluate()["eval_loss"] < before - 0.03
        curves.append(losses(trainer))
    assert curves[1] == pytest.approx(curves[0], rel=LOSS_TOLERANCE[precision])
    assert all(entry["grad_norm"] > 0 for entry in trainer.state.log_history if "grad_norm" in entry)
    model: Any = trainer.model
    wrapper = trainer.optimizer.optimizer  # type: ignore[union-attr]
    assert isinstance(wrapper, MasterWeightOptimizer)
    assert wrapper.state[model.transformer.h[0].mlp.c_fc.weight]["state1"].dtype is torch.uint8
    assert wrapper.state[model.transformer.wte.weight]["state1"].dtype is torch.float32  # the Trainer's override
    assert all(raw_gradient(p) is None for p in model.parameters())


def test_a_skipped_step_is_invisible_to_the_lr_scheduler(tmp_path: Path, gpt2_config: GPT2Config, rows: Rows) -> None:
    seen: list[tuple[Any, float]] = []

    class Watch(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            bits = deep([masters(kwargs["model"]), kwargs["optimizer"].state_dict()["state"]])
            seen.append((bits, kwargs["lr_scheduler"].get_last_lr()[0]))

    args = arguments(tmp_path, precision="fp16-lean")
    trainer = PoisonedTrainer(model_of(gpt2_config), args, train_dataset=rows, callbacks=[Watch()])
    trainer.poisoned = (3,)
    trainer.train()
    assert trainer.mixed_precision is not None and trainer.mixed_precision.stats.skipped_steps == 1
    assert seen[2] == seen[3]
    assert seen[3][0] != seen[4][0] and seen[3][1] > seen[4][1]


@pytest.mark.parametrize(
    ("precision", "accumulation"), [("fp32", 2), ("fp16", 2), ("fp16-lean", 1), ("fp16-lean", 2), ("bf16-lean", 2)]
)
def test_resume_is_bit_exact(
    tmp_path: Path, gpt2_config: GPT2Config, rows: Rows, precision: str, accumulation: int
) -> None:
    config = GPT2Config(**{**gpt2_config.to_dict(), "resid_pdrop": 0.1, "n_layer": 1})  # so that the RNG matters
    settings = {"init_scale": 2.0**12, "headroom": 4, "patience": 2} if "fp16" in precision else None

    def trainer(name: str) -> PoisonedTrainer:
        args = arguments(
            tmp_path / name,
            precision=precision,
            max_steps=20,
            per_device_train_batch_size=2,
            save_strategy="steps",
            save_steps=10,
            gradient_accumulation_steps=accumulation,
            loss_scaler_settings=settings,
        )
        made = PoisonedTrainer(model_of(config), args, train_dataset=rows)
        made.poisoned = () if precision == "fp32" else (2, 13)
        return made

    straight, resumed = trainer("a"), trainer("b")
    straight.train()
    checkpoint = Path(straight.args.output_dir) / "checkpoint-10"
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert same(masters(straight.model), masters(resumed.model))
    assert deep(straight.optimizer.state_dict()) == deep(resumed.optimizer.state_dict())
    assert straight.lr_scheduler.state_dict() == resumed.lr_scheduler.state_dict()
    if precision != "fp32":
        assert straight.mixed_precision is not None and resumed.mixed_precision is not None
        assert straight.mixed_precision.state_dict() == resumed.mixed_precision.state_dict()
        assert straight.mixed_precision.stats.skipped_steps == resumed.mixed_precision.stats.skipped_steps == 2
    drop = {"train_runtime", "train_samples_per_second", "train_steps_per_second", "total_flos", "train_loss"}

    def logs(t: Trainer) -> list[str]:  # as text, where NaN (the norm of the skipped step) equals itself
        return [repr(sorted((k, v) for k, v in entry.items() if k not in drop)) for entry in t.state.log_history]

    assert logs(straight) == logs(resumed)


def test_resume_with_8_bit_states_is_bit_exact(tmp_path: Path, gpt2_config: GPT2Config, rows: Rows) -> None:
    pytest.importorskip("bitsandbytes")

    def trainer(name: str) -> MixedPrecisionTrainer:
        args = arguments(
            tmp_path / name, precision="fp16-lean", optim="adamw_bnb_8bit", save_strategy="steps", save_steps=3
        )
        return MixedPrecisionTrainer(model_of(gpt2_config), args, train_dataset=rows)

    straight, resumed = trainer("a"), trainer("b")
    straight.train()
    resumed.train(resume_from_checkpoint=str(Path(straight.args.output_dir) / "checkpoint-3"))
    assert same(masters(straight.model), masters(resumed.model))
    assert losses(straight) == losses(resumed)


@pytest.mark.parametrize(("saved", "loaded"), [("fp16-lean", "fp16"), ("fp16", "fp16-lean"), ("fp16-lean", "fp32")])
def test_a_run_goes_on_in_another_layout(
    tmp_path: Path, gpt2_config: GPT2Config, rows: Rows, saved: str, loaded: str
) -> None:
    def trainer(name: str, precision: str) -> MixedPrecisionTrainer:
        args = arguments(tmp_path / name, precision=precision, save_strategy="steps", save_steps=3)
        return MixedPrecisionTrainer(model_of(gpt2_config), args, train_dataset=rows)

    first, second = trainer("a", saved), trainer("b", loaded)
    first.train()
    second.train(resume_from_checkpoint=str(Path(first.args.output_dir) / "checkpoint-3"))
    assert losses(second) == pytest.approx(losses(first), rel=1e-3)
    assert losses(second)[:3] == losses(first)[:3]


@every_lean
def test_saved_models_are_ordinary_fp32_models(
    tmp_path: Path, gpt2_config: GPT2Config, rows: Rows, precision: str
) -> None:
    trainer = MixedPrecisionTrainer(
        model_of(gpt2_config), arguments(tmp_path, precision=precision, max_steps=3), train_dataset=rows
    )
    trainer.train()
    trainer.save_model()
    model: Any = trainer.model
    expected = masters(model)
    assert not any(torch.equal(value, value.half().float()) for value in expected.values() if value.dim() > 1)
    for path in (Path(trainer.args.output_dir), tmp_path / "by hand"):
        model.save_pretrained(path)
        config = json.loads((path / "config.json").read_text())
        assert config["dtype"] == "float32"
        loaded = AutoModelForCausalLM.from_pretrained(path)
        assert loaded.dtype is torch.float32
        assert same(masters(loaded), expected)
        assert loaded.lm_head.weight is loaded.transformer.wte.weight
    state = model.state_dict()
    assert state["lm_head.weight"] is state["transformer.wte.weight"] or (
        state["lm_head.weight"].data_ptr() == state["transformer.wte.weight"].data_ptr()
    )
    fresh = GPT2LMHeadModel(gpt2_config)
    fresh.load_state_dict(state)
    assert same(masters(fresh), expected)


def test_loading_a_model_stored_in_fp16(tmp_path: Path, gpt2_config: GPT2Config, rows: Rows) -> None:
    model_of(gpt2_config).half().save_pretrained(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert model.dtype is torch.float16
    args = arguments(tmp_path, precision="fp16-lean", max_steps=10)
    trainer = MixedPrecisionTrainer(model, args, train_dataset=rows, eval_dataset=rows)
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < before - 0.01
    moments = trainer.optimizer.state_dict()["state"][0]
    assert moments["exp_avg"].dtype is moments["exp_avg_sq"].dtype is torch.float32


@every_lean
def test_load_best_model_at_end(tmp_path: Path, gpt2_config: GPT2Config, rows: Rows, precision: str) -> None:
    args = arguments(
        tmp_path,
        precision=precision,
        learning_rate=0.5,  # so that later is worse
        save_strategy="steps",
        eval_strategy="steps",
        save_steps=2,
        eval_steps=2,
        load_best_model_at_end=True,
    )
    trainer = MixedPrecisionTrainer(model_of(gpt2_config), args, train_dataset=rows, eval_dataset=rows[:8])
    trainer.train()
    evaluations = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    assert min(evaluations) < evaluations[-1]
    assert trainer.evaluate()["eval_loss"] == min(evaluations)
    best = AutoModelForCausalLM.from_pretrained(trainer.state.best_model_checkpoint)
    assert same(masters(trainer.model), masters(best))


# Checkpoints of and for a plain Trainer


@pytest.mark.parametrize("precision", ["fp16", "fp16-lean"])
def test_a_checkpoint_of_a_plain_fp16_run_is_taken_over(
    tmp_path: Path, gpt2_config: GPT2Config, rows: Rows, precision: str
) -> None:
    args = arguments(tmp_path, TrainingArguments, max_steps=2, save_strategy="steps", save_steps=2)
    plain = Trainer(model_of(gpt2_config), args, train_dataset=rows)
    plain.train()
    checkpoint = Path(args.output_dir) / "checkpoint-2"
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**9, growth_interval=3)
    torch.save(scaler.state_dict(), checkpoint / "scaler.pt")  # what fp16=True adds on a GPU
    ours = MixedPrecisionTrainer(
        model_of(gpt2_config),
        arguments(tmp_path / "b", precision=precision, loss_scale="dynamic", max_steps=3, learning_rate=0.0),
        train_dataset=rows,
    )
    ours.train(resume_from_checkpoint=str(checkpoint))
    assert ours.mixed_precision is not None
    assert ours.mixed_precision.scaler.state_dict()["scale"] == 2.0**9
    assert ours.mixed_precision.scaler.state_dict()["growth_interval"] == 3
    assert ours.mixed_precision.stats.loss_scale_first == 2.0**9
    assert ours.state.global_step == 3
    state = ours.optimizer.state_dict()["state"][0]
    assert state["step"] == 3 and state["exp_avg"].dtype is torch.float32


@every_lean
def test_a_plain_trainer_resumes_a_run_of_ours(
    tmp_path: Path, gpt2_config: GPT2Config, rows: Rows, precision: str
) -> None:
    args = arguments(tmp_path, precision=precision, save_strategy="steps", save_steps=3)
    ours = MixedPrecisionTrainer(model_of(gpt2_config), args, train_dataset=rows)
    ours.train()
    plain = Trainer(model_of(gpt2_config), arguments(tmp_path / "b", TrainingArguments), train_dataset=rows)
    plain.train(resume_from_checkpoint=str(Path(args.output_dir) / "checkpoint-3"))
    assert losses(plain) == pytest.approx(losses(ours), rel=LOSS_TOLERANCE[precision])
    assert all(p.dtype is torch.float32 for p in plain.model.parameters())


def test_a_file_cut_in_half_is_named_and_the_others_are_left_alone(
    tmp_path: Path, gpt2_config: GPT2Config, rows: Rows
) -> None:
    args = arguments(tmp_path, precision="fp16-lean", max_steps=1, save_strategy="steps", save_steps=1)
    MixedPrecisionTrainer(model_of(gpt2_config), args, train_dataset=rows).train()
    checkpoint = Path(args.output_dir) / "checkpoint-1"
    whole = {path: path.read_bytes() for path in checkpoint.iterdir()}
    assert {"model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth"} < {path.name for path in whole}
    for path, content in whole.items():
        path.write_bytes(content[: len(content) // 2])
        again = MixedPrecisionTrainer(
            model_of(gpt2_config), arguments(tmp_path / "b", precision="fp16-lean", max_steps=4), train_dataset=rows
        )
        before = masters(again.model)
        with pytest.raises(ValueError, match=re.escape(path.name)):
            again.train(resume_from_checkpoint=str(checkpoint))
        assert same(before, masters(again.model)) or path.name == STATE_NAME
        assert all(p.read_bytes() == other for p, other in whole.items() if p != path)
        path.write_bytes(content)


# Explicit scalers


def test_a_static_scale_of_one_leaves_gradients_unscaled(gpt2: GPT2LMHeadModel, batch: Batch) -> None:
    runtime = MixedPrecision("fp16-lean", loss_scaler=StaticLossScaler(1.0))
    runtime.attach(gpt2)
    gpt2(**batch).loss.backward()
    raw = raw_gradient(gpt2.lm_head.weight)
    assert raw is not None and torch.equal(raw.float(), gpt2.lm_head.weight.grad)  # type: ignore[arg-type]
