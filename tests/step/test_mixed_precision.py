"""The runtime: the invariants of attaching mixed precision to a model and an optimizer."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from collections import defaultdict
from dataclasses import dataclass
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_
from transformers import GPT2LMHeadModel

import hf_mp
from hf_mp.casting.mode import active_autocast
from hf_mp.scaling.rules import HeadroomState
from hf_mp.scaling.scalers import DynamicLossScaler, LossScaleError, StaticLossScaler
from hf_mp.step import gradients as gradient_check
from hf_mp.step.forward import AttachedForward
from hf_mp.step.mixed_precision import MixedPrecision
from hf_mp.weights import layout as layout_module

Batch = dict[str, Tensor]
# FP16 has 11 significant bits: a chain of a few dozen roundings leaves gradients within about 10 half-ulps (2**-11).
RELATIVE_GRADIENT_ERROR = {"fp16": 5e-3, "bf16": 4e-2}


def runtime_of(model: nn.Module) -> MixedPrecision:
    forward: Any = model.forward
    return forward.runtime


def snapshot(tensors: Any) -> list[Tensor]:
    return [tensor.detach().clone() for tensor in tensors]


def same(left: list[Tensor], right: list[Tensor]) -> bool:
    return len(left) == len(right) and all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def assert_copies_are_rounded_masters(model: nn.Module) -> None:
    copies = runtime_of(model).layout.copies
    assert len(copies) > 0
    for parameter in model.parameters():
        assert torch.equal(copies.get(parameter), parameter.detach().to(copies.dtype))


# Invariant 1: when backward() returns, .grad is FP32 and unscaled.


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_gradients_are_fp32_and_true_after_backward(gpt2: GPT2LMHeadModel, batch: Batch, precision: str) -> None:
    reference = copy.deepcopy(gpt2)
    MixedPrecision(precision).attach(gpt2)
    gpt2(**batch).loss.backward()
    reference(**batch).loss.backward()
    for (name, ours), theirs in zip(gpt2.named_parameters(), reference.parameters(), strict=True):
        assert ours.grad is not None and theirs.grad is not None
        assert ours.grad.dtype is torch.float32, name
        error = (ours.grad - theirs.grad).norm() / theirs.grad.norm()
        assert error < RELATIVE_GRADIENT_ERROR[precision], (name, error)


def test_gradients_do_not_depend_on_the_scale_and_would_underflow_without_it(
    gpt2: GPT2LMHeadModel, batch: Batch
) -> None:
    def gradients(scale: float) -> list[Tensor]:
        model = copy.deepcopy(gpt2)
        MixedPrecision("fp16", loss_scaler=StaticLossScaler(scale)).attach(model)
        (model(**batch).loss * 2.0**-14).backward()
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    unscaled, scaled, more = gradients(1.0), gradients(2.0**20), gradients(2.0**22)
    zeros = [sum((g == 0).sum().item() for g in grads) for grads in (unscaled, scaled)]
    assert zeros[0] > 2 * zeros[1] + 1000
    for left, right in zip(scaled, more, strict=True):
        assert (left - right).norm() < 2e-3 * right.norm()


def test_accumulation_sums_true_gradients_in_fp32(gpt2: GPT2LMHeadModel, batch: Batch) -> None:
    MixedPrecision("fp16").attach(gpt2)
    halves = [{key: value[rows] for key, value in batch.items()} for rows in (slice(0, 2), slice(2, 4))]
    single = []
    for half in halves:
        gpt2(**half).loss.backward()
        single.append([p.grad.clone() for p in gpt2.parameters() if p.grad is not None])
        gpt2.zero_grad()
    for half in halves:
        gpt2(**half).loss.backward()
    total = [p.grad for p in gpt2.parameters() if p.grad is not None]
    assert same(total, [a + b for a, b in zip(*single, strict=True)])


def test_a_loss_made_outside_of_logits_is_scaled_as_well(gpt2: GPT2LMHeadModel, batch: Batch) -> None:
    runtime = MixedPrecision("fp16")
    runtime.attach(gpt2)
    gpt2(**batch).loss.backward()
    inside = snapshot(p.grad for p in gpt2.parameters())
    gpt2.zero_grad()
    logits = gpt2(input_ids=batch["input_ids"]).logits
    assert logits.dtype is torch.float32
    nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten()).backward()
    for left, right in zip(inside, snapshot(p.grad for p in gpt2.parameters()), strict=True):
        # the two losses round the FP16 gradient of the logits apart where they differ in FP32's last place
        torch.testing.assert_close(left, right, rtol=5e-3, atol=1e-5)


def test_a_penalty_on_the_weights_outside_the_model_is_not_unscaled(gpt2: GPT2LMHeadModel) -> None:
    MixedPrecision("fp16", loss_scaler=StaticLossScaler(1024.0)).attach(gpt2)
    (gpt2.transformer.wte.weight**2).sum().backward()
    assert gpt2.transformer.wte.weight.grad is not None
    assert torch.equal(gpt2.transformer.wte.weight.grad, 2 * gpt2.transformer.wte.weight.detach())


def test_a_gradient_penalty_is_that_of_fp32(gpt2: GPT2LMHeadModel, batch: Batch) -> None:
    def penalty_gradients(model: nn.Module) -> list[Tensor]:
        model.set_attn_implementation("eager")  # torch's fused attention has no second derivative
        loss = model(**batch).loss
        gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        (loss + sum(gradient.pow(2).sum() for gradient in gradients)).backward()
        return snapshot(p.grad for p in model.parameters())

    attached = copy.deepcopy(gpt2)
    MixedPrecision("fp16").attach(attached)
    for ours, theirs in zip(penalty_gradients(attached), penalty_gradients(gpt2), strict=True):
        assert (ours - theirs).norm() < 1e-2 * theirs.norm()


# Invariant 2: a skipped step changes nothing but the scaler.


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.parametrize("scaler", ["headroom", "dynamic"])
def test_a_skipped_step_changes_nothing_but_the_scaler(
    gpt2: GPT2LMHeadModel, batch: Batch, value: float, scaler: str
) -> None:
    optimizer = torch.optim.AdamW(gpt2.parameters(), lr=1e-3, amsgrad=True)
    hf_mp.prepare(gpt2, optimizer, f"compute=fp16,loss_scale={scaler}")
    runtime = runtime_of(gpt2)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=10)
    gpt2(**batch).loss.backward()
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()

    gpt2(**batch).loss.backward()
    gpt2.transformer.h[0].mlp.c_fc.weight.grad[3, 5] = value
    weights, state, scale = snapshot(gpt2.parameters()), copy.deepcopy(optimizer.state_dict()), runtime.scaler.state
    copies = snapshot(runtime.layout.copies.get(p) for p in gpt2.parameters())
    assert optimizer.step() is None
    assert runtime.step_was_skipped and runtime.stats.skipped_steps == 1
    assert same(weights, snapshot(gpt2.parameters()))
    assert same(copies, snapshot(runtime.layout.copies.get(p) for p in gpt2.parameters()))
    after = optimizer.state_dict()
    assert after["param_groups"] == state["param_groups"]
    for key, entry in state["state"].items():
        assert all(torch.equal(entry[name], after["state"][key][name]) for name in entry)
    assert runtime.scaler.get_scale() == (1.0 if isinstance(scale, HeadroomState) else scale.scale / 2)

    optimizer.zero_grad()
    gpt2(**batch).loss.backward()
    optimizer.step()
    assert not runtime.step_was_skipped and runtime.stats.skipped_steps == 1
    assert not same(weights, snapshot(gpt2.parameters()))


def test_the_first_steps_are_not_wasted(gpt2: GPT2LMHeadModel, batch: Batch) -> None:
    optimizer = torch.optim.AdamW(gpt2.parameters(), lr=1e-3)
    hf_mp.prepare(gpt2, optimizer)
    for _ in range(10):
        gpt2(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    stats = runtime_of(gpt2).stats
    assert stats.steps == 10 and stats.skipped_steps == 0
    assert stats.headroom is not None and 5 < stats.headroom < 12  # the first measurement sets the scale


def test_largest_gradient_is_that_before_clipping(gpt2: GPT2LMHeadModel, batch: Batch) -> None:
    optimizer = torch.optim.SGD(gpt2.parameters(), lr=1e-3)
    hf_mp.prepare(gpt2, optimizer)
    gpt2(**batch).loss.backward()
    largest = max(p.grad.abs().max().item() for p in gpt2.parameters() if p.grad is not None)
    nn.utils.clip_grad_norm_(gpt2.parameters(), 1e-6)
    optimizer.step()
    state: Any = runtime_of(gpt2).scaler.state
    assert state.level == largest


# Invariant 3: outside step(), working copy == master rounded to nearest; outside writes are honoured.


def write_in_place(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)


def write_through_data(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data.add_(0.25)


def write_one_element_through_data(model: nn.Module) -> None:
    model.get_parameter("transformer.h.0.mlp.c_fc.weight").data[3, 5] = 17.0


def replace_data(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data = torch.randn_like(parameter)


def load_state(model: nn.Module) -> None:
    model.load_state_dict({key: value + 1 for key, value in model.state_dict().items()})


WRITES = [write_in_place, write_through_data, write_one_element_through_data, replace_data, load_state]


@pytest.mark.parametrize("write", WRITES)
def test_a_weight_written_from_outside_is_honoured(gpt2: GPT2LMHeadModel, batch: Batch, write: Any) -> None:
    optimizer = torch.optim.AdamW(gpt2.parameters(), lr=1e-3)
    hf_mp.prepare(gpt2, optimizer)
    gpt2(**batch).loss.backward()
    optimizer.step()
    assert_copies_are_rounded_masters(gpt2)
    before = gpt2(**batch).loss.item()
    write(gpt2)
    fresh = copy.deepcopy(gpt2)  # has made no working copies yet
    written = gpt2(**batch).loss.item()
    assert written == fresh(**batch).loss.item()
    assert written != before
    assert_copies_are_rounded_masters(gpt2)


def test_training_goes_on_from_the_written_weight(gpt2: GPT2LMHeadModel, batch: Batch) -> None:
    optimizer = torch.optim.SGD(gpt2.parameters(), lr=1.0)
    hf_mp.prepare(gpt2, optimizer)
    for _ in range(2):
        write_through_data(gpt2)
        written = snapshot(gpt2.parameters())
        gpt2(**batch).loss.backward()
        expected = [w - p.grad for w, p in zip(written, gpt2.parameters(), strict=True)]
        optimizer.step()
        optimizer.zero_grad()
        assert same(expected, snapshot(gpt2.parameters()))
        assert_copies_are_rounded_masters(gpt2)


# Invariant 6: detach() leaves the model as an ordinary FP32 model.


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_detach_leaves_an_ordinary_fp32_model(gpt2: GPT2LMHeadModel, batch: Batch, dtype: torch.dtype) -> None:
    fresh = copy.deepcopy(gpt2)
    gpt2.to(dtype)
    optimizer = torch.optim.AdamW(gpt2.parameters(), lr=1e-3)
    runtime = MixedPrecision("fp16")
    runtime.attach(gpt2)
    runtime.attach_optimizer(optimizer)
    gpt2(**batch).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    runtime.detach()

    assert "step" not in optimizer.__dict__
    for ours, plain in zip(gpt2.modules(), fresh.modules(), strict=True):
        assert set(ours.__dict__) == set(plain.__dict__)
        assert not ours._forward_hooks and not ours._forward_pre_hooks
    for parameter in gpt2.parameters():
        assert type(parameter) is nn.Parameter and parameter.dtype is torch.float32
        assert not vars(parameter) and not parameter._backward_hooks
    fresh.load_state_dict(gpt2.state_dict())
    assert torch.equal(gpt2(**batch).logits, fresh(**batch).logits)
    reference = weakref.ref(runtime)
    del runtime
    gc.collect()
    assert reference() is None


def test_detach_under_an_lr_scheduler_made_later(gpt2: GPT2LMHeadModel, batch: Batch) -> None:
    optimizer = torch.optim.SGD(gpt2.parameters(), lr=1.0)
    runtime = MixedPrecision("fp16")
    runtime.attach(gpt2)
    runtime.attach_optimizer(optimizer)
    torch.optim.lr_scheduler.LinearLR(optimizer)
    runtime.detach()
    before = snapshot(gpt2.parameters())
    gpt2(**batch).loss.backward()
    optimizer.step()
    assert runtime.stats.steps == 0 and not same(before, snapshot(gpt2.parameters()))


def test_attach_again_after_detach(gpt2: GPT2LMHeadModel, batch: Batch) -> None:
    runtime = MixedPrecision("fp16")
    runtime.attach(gpt2)
    with pytest.raises(ValueError, match=r"has a model already: detach\(\) it"):
        runtime.attach(gpt2)
    with pytest.raises(ValueError, match=r"is attached to a MixedPrecision already: call hf_mp\.detach\(model\) first"):
        MixedPrecision("bf16").attach(gpt2)
    loss = gpt2(**batch).loss
    runtime.detach()
    runtime.attach(gpt2)
    assert torch.equal(gpt2(**batch).loss, loss)


# Invariant 7, as far as the runtime goes.


def test_an_exception_in_forward_leaves_nothing_behind(gpt2: GPT2LMHeadModel, batch: Batch) -> None:
    MixedPrecision("fp16").attach(gpt2)
    with pytest.raises(ValueError, match=r"cannot specify both input_ids and inputs_embeds|exactly one of input_ids"):
        gpt2(input_ids=batch["input_ids"], inputs_embeds=torch.ones(4, 32, 64))
    assert active_autocast() is None
    assert torch.randn(2, 2).matmul(torch.randn(2, 2)).dtype is torch.float32
    assert gpt2(**batch).loss.isfinite()


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_gradient_checkpointing_gives_the_same_gradients(
    gpt2: GPT2LMHeadModel, batch: Batch, use_reentrant: bool
) -> None:
    MixedPrecision("fp16").attach(gpt2)
    gpt2(**batch).loss.backward()
    plain = snapshot(p.grad for p in gpt2.parameters())
    gpt2.zero_grad()
    gpt2.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    gpt2(**batch).loss.backward()
    assert same(plain, snapshot(p.grad for p in gpt2.parameters()))


# Invariant 8: tied weights have one master and one working copy.


def test_tied_weights_have_one_master_and_one_working_copy(gpt2: GPT2LMHeadModel, batch: Batch) -> None:
    gpt2.half()
    runtime = MixedPrecision("fp16")
    runtime.attach(gpt2)
    assert gpt2.lm_head.weight is gpt2.transformer.wte.weight
    assert gpt2.lm_head.weight.dtype is torch.float32
    gpt2(**batch).loss.backward()
    used = {id(p) for name, p in gpt2.named_parameters() if "ln_" not in name and "wpe" not in name}
    assert len(runtime.layout.copies) == len(used)
    copies = runtime.layout.copies
    assert copies.get(gpt2.lm_head.weight) is copies.get(gpt2.transformer.wte.weight)


# A model loaded in FP16/BF16, frozen parameters, other models and other people's code


def test_a_16_bit_model_that_becomes_fp32_is_told_of_once(
    gpt2: GPT2LMHeadModel, batch: Batch, caplog: pytest.LogCaptureFixture
) -> None:
    model = copy.deepcopy(gpt2).bfloat16()
    MixedPrecision("fp16").attach(gpt2)
    assert not caplog.records
    runtime = MixedPrecision("fp16")
    runtime.attach(model)
    model(**batch)
    (line,) = [record.getMessage() for record in caplog.records]
    count, mib = len(list(model.parameters())), sum(2 * p.numel() for p in model.parameters()) / 2**20
    assert line.startswith(f"{count} trained parameters came in bfloat16: they are FP32 master weights now")
    assert f"and take {mib:,.1f} MiB more" in line


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_model_in_fp16_is_given_masters_and_small_updates_are_not_lost(dtype: torch.dtype) -> None:
    def weight_after(precision: str | None) -> float:
        layer = nn.Linear(1, 1, bias=False).to(dtype)
        nn.init.ones_(layer.weight)
        optimizer = torch.optim.SGD(layer.parameters(), lr=1e-4)
        if precision:
            hf_mp.prepare(layer, optimizer, precision)
        for _ in range(100):
            x = torch.ones(1, 1, dtype=torch.float32 if precision else dtype)
            layer(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return layer.weight.item()

    assert weight_after(None) == 1.0
    assert weight_after("fp16" if dtype is torch.float16 else "bf16") == pytest.approx(0.99, rel=1e-5)


def test_frozen_parameters_stay_as_they_are(gpt2: GPT2LMHeadModel, batch: Batch) -> None:
    gpt2.half()
    for parameter in gpt2.transformer.h[0].parameters():
        parameter.requires_grad_(False)
    MixedPrecision("fp16").attach(gpt2)
    gpt2(**batch).loss.backward()
    assert all(p.dtype is torch.float16 and p.grad is None for p in gpt2.transformer.h[0].parameters())
    assert all(p.grad is not None and p.dtype is torch.float32 for p in gpt2.transformer.h[1].parameters())


def test_inputs_that_want_gradients_get_true_ones(gpt2: GPT2LMHeadModel, batch: Batch) -> None:
    embeddings = gpt2.transformer.wte(batch["input_ids"]).detach().requires_grad_()
    gpt2(inputs_embeds=embeddings, labels=batch["labels"]).loss.backward()
    expected = embeddings.grad
    embeddings.grad = None
    MixedPrecision("fp16").attach(gpt2)
    gpt2(inputs_embeds=embeddings, labels=batch["labels"]).loss.backward()
    assert expected is not None and embeddings.grad is not None
    assert (embeddings.grad - expected).norm() < RELATIVE_GRADIENT_ERROR["fp16"] * expected.norm()


def test_a_deep_copy_is_attached_to_its_own_weights(gpt2: GPT2LMHeadModel, batch: Batch) -> None:
    MixedPrecision("fp16").attach(gpt2)
    loss = gpt2(**batch).loss
    copied = copy.deepcopy(gpt2)
    assert torch.equal(copied(**batch).loss, loss)
    write_in_place(copied)
    assert torch.equal(gpt2(**batch).loss, loss)
    assert not torch.equal(copied(**batch).loss, loss)
    runtime_of(copied).detach()
    assert isinstance(gpt2.forward, AttachedForward) and not isinstance(copied.forward, AttachedForward)


def test_a_pickled_model_is_an_ordinary_model(gpt2: GPT2LMHeadModel, batch: Batch) -> None:
    MixedPrecision("fp16").attach(gpt2)
    gpt2(**batch)
    loaded = pickle.loads(pickle.dumps(gpt2))
    assert all(type(p) is nn.Parameter for p in loaded.parameters())
    assert not isinstance(loaded.forward, AttachedForward)
    buffer = io.BytesIO()
    torch.save(gpt2.state_dict(), buffer)
    buffer.seek(0)
    assert set(torch.load(buffer, weights_only=True)) == set(loaded.state_dict())
    write_in_place(loaded)
    assert not torch.equal(loaded(**batch).logits, gpt2(**batch).logits)


def test_a_plain_module_and_nested_outputs() -> None:
    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> dict[str, Any]:
            y = self.layer(x)
            return {"pair": (y, [y * 2]), "count": 3, "ids": torch.tensor([1]), "none": None}

    model = Nested()
    MixedPrecision("fp16").attach(model)
    out = model(torch.randn(2, 4))
    assert out["pair"][0].dtype is out["pair"][1][0].dtype is torch.float32
    assert out["count"] == 3 and out["ids"].dtype is torch.int64 and out["none"] is None
    (out["pair"][0].sum() + out["pair"][1][0].sum()).backward()
    assert model.layer.bias.grad is not None and model.layer.bias.grad.tolist() == [6.0, 6.0, 6.0]


def test_a_transposed_or_indexed_parameter_is_unscaled(batch: Batch) -> None:
    class Views(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2, 3))
            self.shift = nn.Parameter(torch.zeros(5, 3))

        def forward(self, x: Tensor) -> Tensor:
            return (
                (x @ self.weight.T).sum()
                + (x + self.shift[1]).sum()
                + torch.stack([self.shift[2], self.shift[3]]).sum()
            )

    model = Views()
    MixedPrecision("fp16", loss_scaler=StaticLossScaler(256.0)).attach(model)
    model(torch.ones(1, 3)).backward()
    assert model.weight.grad is not None and model.weight.grad.tolist() == [[1.0] * 3] * 2
    assert model.shift.grad is not None and model.shift.grad[:, 0].tolist() == [0.0, 1.0, 1.0, 1.0, 0.0]


def test_generate_uses_working_copies(gpt2: GPT2LMHeadModel, batch: Batch) -> None:
    gpt2.eval()
    runtime = MixedPrecision("fp16")
    runtime.attach(gpt2)
    tokens = gpt2.generate(batch["input_ids"][:1, :4], max_new_tokens=5, do_sample=False, pad_token_id=0)
    assert tokens.shape[1] == 9 and len(runtime.layout.copies) > 0


def test_fp32_changes_nothing(gpt2: GPT2LMHeadModel) -> None:
    before = set(gpt2.__dict__)
    optimizer = torch.optim.SGD(gpt2.parameters())
    assert hf_mp.prepare(gpt2, optimizer, "fp32") == (gpt2, optimizer)
    assert set(gpt2.__dict__) == before and "step" not in optimizer.__dict__
    assert all(type(p) is nn.Parameter for p in gpt2.parameters())


def test_a_closure_runs_once_and_its_loss_comes_back(gpt2: GPT2LMHeadModel, batch: Batch) -> None:
    optimizer = torch.optim.SGD(gpt2.parameters(), lr=0.1)
    hf_mp.prepare(gpt2, optimizer)
    calls = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = gpt2(**batch).loss
        loss.backward()
        calls.append(loss)
        return loss

    before = snapshot(gpt2.parameters())
    assert optimizer.step(closure) is calls[0] and len(calls) == 1
    assert not same(before, snapshot(gpt2.parameters()))


# State and bad input


def test_state_round_trip_from_other_than_default_values(gpt2: GPT2LMHeadModel, batch: Batch) -> None:
    optimizer = torch.optim.SGD(gpt2.parameters(), lr=0.1)
    hf_mp.prepare(gpt2, optimizer)
    for poison in (False, True, False):
        gpt2(**batch).loss.backward()
        if poison:
            gpt2.lm_head.weight.grad[0, 0] = float("inf")
        optimizer.step()
        optimizer.zero_grad()
    state = runtime_of(gpt2).state_dict()
    other = MixedPrecision("fp16")
    other.load_state_dict(state)
    assert other.state_dict() == state
    assert (other.stats.steps, other.stats.skipped_steps) == (3, 1)


def test_bad_states_are_refused() -> None:
    with pytest.raises(ValueError, match="not a mixed precision state of version 1: version=7"):
        MixedPrecision("fp16").load_state_dict({"version": 7})
    with pytest.raises(ValueError, match=r"version=None, keys \[0\.5, 'scale'\]"):
        MixedPrecision("fp16").load_state_dict({"scale": 2.0, 0.5: 1})
    dynamic = MixedPrecision("fp16", loss_scaler=DynamicLossScaler()).state_dict()
    with pytest.raises(ValueError, match=r"neither one of a 'headroom' loss scaler.*kind='dynamic'"):
        MixedPrecision("fp16").load_state_dict(dynamic)


def test_bad_models_and_orders_are_refused() -> None:
    integers = nn.Module()
    integers.register_parameter("ids", nn.Parameter(torch.ones(3, dtype=torch.int64), requires_grad=False))
    with pytest.raises(ValueError, match="has no floating parameters, so there is nothing to train"):
        MixedPrecision("fp16").attach(integers)
    with pytest.raises(ValueError, match="attach a model before its optimizer"):
        MixedPrecision("fp16").attach_optimizer(torch.optim.SGD([nn.Parameter(torch.ones(1))]))
    layer = nn.Linear(1, 1)
    with pytest.raises(ValueError, match="LBFGS calls its closure several times in a step"):
        hf_mp.prepare(layer, torch.optim.LBFGS(layer.parameters()))
    with pytest.raises(ValueError, match="use DistributedDataParallel"):
        MixedPrecision("fp16").attach(nn.DataParallel(nn.Linear(1, 1)))
    with pytest.raises(ValueError, match="precision='fp8' is not known: use one of fp32, fp16"):
        MixedPrecision("fp8")


def test_resized_embeddings_get_working_copies_of_their_own(gpt2: GPT2LMHeadModel, batch: Batch) -> None:
    runtime = MixedPrecision("fp16")
    runtime.attach(gpt2)
    gpt2(**batch).loss.backward()
    gpt2.zero_grad()
    old = len(runtime.layout.copies)
    gpt2.resize_token_embeddings(211, mean_resizing=False)
    logits = gpt2(**batch).logits
    assert logits.shape[-1] == 211 and len(runtime.layout.copies) == old
    assert runtime.layout.copies.get(gpt2.lm_head.weight).shape == (211, 64)
    write_through_data(gpt2)
    assert not torch.equal(gpt2(**batch).logits, logits)


def test_rules_keep_a_module_in_fp32(gpt2: GPT2LMHeadModel, batch: Batch) -> None:
    seen: list[torch.dtype] = []
    gpt2.lm_head.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    reference = copy.deepcopy(gpt2)
    MixedPrecision("fp16", rules={"lm_head": "fp32"}).attach(gpt2)
    gpt2(**batch).loss.backward()
    assert seen == [torch.float32]
    reference(**batch).loss.backward()
    ours, theirs = gpt2.lm_head.weight.grad, reference.lm_head.weight.grad
    assert ours is not None and theirs is not None
    assert (ours - theirs).norm() < RELATIVE_GRADIENT_ERROR["fp16"] * theirs.norm()


def test_a_rule_that_matches_no_module_is_refused(gpt2: GPT2LMHeadModel) -> None:
    with pytest.raises(ValueError, match="rule 'head' matches no module of GPT2LMHeadModel; close to it are 'lm_head'"):
        MixedPrecision("fp16", rules={"head": "fp32"}).attach(gpt2)


def test_a_state_of_another_loss_scaling_warns_and_starts_anew() -> None:
    fp16 = MixedPrecision("fp16")
    before = fp16.scaler.state
    with pytest.warns(UserWarning, match="loss_scale was none in the saved run, and is headroom here.*starts anew"):
        fp16.load_state_dict(MixedPrecision("bf16").state_dict())
    assert fp16.scaler.state == before


@pytest.mark.parametrize("scaler", ["headroom", "dynamic", "1024"])
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_an_overflow_that_clipping_by_value_hides_is_seen(
    gpt2: GPT2LMHeadModel, batch: Batch, scaler: str, value: float
) -> None:
    optimizer = torch.optim.SGD(gpt2.parameters(), lr=0.1)
    hf_mp.prepare(gpt2, optimizer, f"compute=fp16,loss_scale={scaler}")
    before = snapshot(gpt2.parameters())
    (gpt2(**batch).loss * value).backward()
    torch.nn.utils.clip_grad_value_(gpt2.parameters(), 1.0)
    optimizer.step()
    assert runtime_of(gpt2).stats.skipped_steps == 1 and same(before, snapshot(gpt2.parameters()))


def test_a_bad_backward_that_was_thrown_away_does_not_count(gpt2: GPT2LMHeadModel, batch: Batch) -> None:
    optimizer = torch.optim.SGD(gpt2.parameters(), lr=0.1)
    hf_mp.prepare(gpt2, optimizer)
    (gpt2(**batch).loss * float("inf")).backward()
    optimizer.zero_grad()
    gpt2(**batch).loss.backward()
    optimizer.step()
    assert runtime_of(gpt2).stats.steps == 1 and runtime_of(gpt2).stats.skipped_steps == 0


def test_outputs_in_dataclasses_and_namespaces_cross_the_border() -> None:
    @dataclass
    class Output:
        loss: Tensor
        extra: Any

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 1)

        def forward(self, x: Tensor) -> Output:
            return Output(self.layer(x).sum(), SimpleNamespace(twice=2 * self.layer(x).sum()))

    model = Model()
    MixedPrecision("fp16", loss_scaler=StaticLossScaler(1024.0)).attach(model)
    output = model(torch.ones(2, 3))
    (output.loss + output.extra.twice).backward()
    assert model.layer.bias.grad is not None and model.layer.bias.grad.item() == 6.0


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
def test_parameters_that_autocast_leaves_alone_get_true_gradients(dtype: torch.dtype) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2, 2, dtype=dtype))
            self.other = nn.Parameter(torch.ones(1))

        def forward(self, x: Tensor) -> Tensor:
            return torch.matmul(x, self.weight)

    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    hf_mp.prepare(model, optimizer, "compute=fp16,loss_scale=1024")
    y = model(torch.ones(1, 2, dtype=dtype))
    assert y.dtype is dtype
    y.real.sum().backward()
    assert model.weight.grad is not None and torch.equal(model.weight.grad, torch.ones(2, 2, dtype=dtype))
    optimizer.step()
    assert runtime_of(model).stats.skipped_steps == 0


def test_parameters_unfrozen_later_are_given_masters(gpt2: GPT2LMHeadModel, batch: Batch) -> None:
    gpt2.half()
    frozen = list(gpt2.transformer.h[0].parameters())
    for parameter in frozen:
        parameter.requires_grad_(False)
    MixedPrecision("fp16").attach(gpt2)
    gpt2(**batch).loss.backward()
    for parameter in frozen:
        parameter.requires_grad_(True)
    gpt2(**batch).loss.backward()
    assert all(p.dtype is torch.float32 and p.grad is not None for p in frozen)


def test_detach_reaches_what_was_attached_when_the_outer_model_is_gone(gpt2: GPT2LMHeadModel) -> None:
    outer = nn.Sequential(gpt2)
    runtime = MixedPrecision("fp16")
    runtime.attach(outer)
    del outer
    gc.collect()
    assert runtime.model is None and isinstance(gpt2.forward, AttachedForward)
    runtime.detach()
    assert not isinstance(gpt2.forward, AttachedForward)
    MixedPrecision("fp16").attach(gpt2)


@dataclass(slots=True)
class Slotted:
    logits: Tensor


@pytest.mark.parametrize(
    ("wrap", "unwrap"),
    [
        (lambda y: (SimpleNamespace(logits=y), 1), lambda found: found[0].logits),
        (lambda y: {"head": [SimpleNamespace(logits=y)]}, lambda found: found["head"][0].logits),
        (Slotted, lambda found: found.logits),
        (lambda y: defaultdict(list, logits=y), lambda found: found["logits"]),
        (lambda y: MappingProxyType({"logits": y}), lambda found: found["logits"]),
    ],
    ids=["namespace in a tuple", "namespace in a dict", "slots", "defaultdict", "mapping proxy"],
)
def test_containers_of_every_kind_cross_the_border(wrap: Any, unwrap: Any) -> None:
    class Wrapping(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            return wrap(super().forward(x))

    gradients = []
    for precision in ("fp32", "fp16"):
        torch.manual_seed(0)
        model = Wrapping(8, 8)
        model, _ = hf_mp.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), precision)
        unwrap(model(torch.randn(4, 8))).square().sum().backward()
        gradients.append(model.weight.grad)
    torch.testing.assert_close(gradients[1], gradients[0], rtol=0.02, atol=0.02)


def test_a_model_may_write_into_the_containers_that_it_is_given() -> None:
    class Writing(nn.Linear):
        def forward(self, batch: dict[str, Any], seen: list[int]) -> Any:  # type: ignore[override]
            seen.append(1)
            batch["hidden"] = super().forward(batch["x"])
            return ()

    model = Writing(8, 8)
    hf_mp.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    batch: dict[str, Any] = defaultdict(list, x=torch.randn(2, 8))
    seen: list[int] = []
    assert model(batch, seen) == ()
    assert seen == [1] and "hidden" in batch


class TestMeasuring:
    @pytest.fixture
    def scans(self, monkeypatch: pytest.MonkeyPatch) -> list[int]:
        """Filled with the number of gradients of every scan."""
        counts: list[int] = []
        original = layout_module.largest_magnitude

        def counted(tensors: Any) -> Tensor:
            tensors = list(tensors)
            counts.append(len(tensors))
            return original(tensors)

        monkeypatch.setattr(layout_module, "largest_magnitude", counted)
        return counts

    def trained(
        self, gpt2: GPT2LMHeadModel, batch: Batch, measures_norm: bool = False
    ) -> tuple[MixedPrecision, torch.optim.Optimizer]:
        runtime = MixedPrecision("fp16")
        runtime.check.measures_norm = measures_norm
        runtime.attach(gpt2)
        optimizer = runtime.attach_optimizer(torch.optim.SGD(gpt2.parameters(), lr=0.1))
        gpt2(**batch).loss.backward()
        return runtime, optimizer

    def test_gradients_that_we_clip_are_read_once(
        self, gpt2: GPT2LMHeadModel, batch: Batch, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        runtime, optimizer = self.trained(gpt2, batch, measures_norm=True)
        parameters = list(gpt2.parameters())
        norm = runtime.check.norm(parameters)
        assert norm is not None
        monkeypatch.setattr(
            gradient_check, "magnitude_bound", lambda *args: pytest.fail("the gradients were read again")
        )
        before = [torch.clone(parameter.grad) for parameter in parameters if parameter.grad is not None]
        runtime.check.clip(parameters, float(norm) / 2, norm)
        optimizer.step()
        assert not optimizer.step_was_skipped
        halves = [2 * parameter.grad for parameter in parameters if parameter.grad is not None]
        assert all(torch.allclose(now, then) for now, then in zip(halves, before, strict=True))

    @pytest.mark.parametrize("factor", [1e30, torch.inf])
    def test_gradients_without_a_finite_norm_are_clipped_as_torch_does(
        self, gpt2: GPT2LMHeadModel, batch: Batch, factor: float
    ) -> None:
        outcomes = []
        for is_ours in (True, False):
            model = copy.deepcopy(gpt2)
            runtime = MixedPrecision("bf16")
            runtime.check.measures_norm = True
            runtime.attach(model)
            optimizer = runtime.attach_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
            (model(**batch).loss * factor).backward()
            parameters = list(model.parameters())
            norm = runtime.check.norm(parameters)
            assert norm is not None and not norm.isfinite()
            (runtime.check.clip if is_ours else clip_grads_with_norm_)(parameters, 1.0, norm)
            optimizer.step()
            outcomes.append(optimizer.step_was_skipped)
        assert outcomes[0] is outcomes[1] is (factor == torch.inf)

    def test_a_write_after_our_clipping_is_seen(self, gpt2: GPT2LMHeadModel, batch: Batch) -> None:
        runtime, optimizer = self.trained(gpt2, batch, measures_norm=True)
        parameters = list(gpt2.parameters())
        norm = runtime.check.norm(parameters)
        assert norm is not None and parameters[0].grad is not None
        runtime.check.clip(parameters, float(norm) / 2, norm)
        parameters[0].grad[0, 0] = torch.nan
        optimizer.step()
        assert optimizer.step_was_skipped

    def test_gradients_that_nobody_touched_are_read_once(
        self, gpt2: GPT2LMHeadModel, batch: Batch, scans: list[int]
    ) -> None:
        _, optimizer = self.trained(gpt2, batch)
        optimizer.step()
        assert scans == [len(list(gpt2.parameters()))]

    @pytest.mark.parametrize("how", ["in place", "replaced"])
    def test_what_was_written_after_the_backward_is_looked_at(
        self, gpt2: GPT2LMHeadModel, batch: Batch, how: str
    ) -> None:
        runtime, optimizer = self.trained(gpt2, batch)
        weight = gpt2.transformer.wte.weight
        assert weight.grad is not None
        if how == "in place":
            weight.grad[0, 0] = float("inf")
        else:
            weight.grad = torch.full_like(weight, float("nan"))
        optimizer.step()
        assert runtime.step_was_skipped

    def test_the_norm_is_known_until_a_gradient_changes(self, gpt2: GPT2LMHeadModel, batch: Batch) -> None:
        runtime = MixedPrecision("fp16")
        runtime.attach(gpt2)
        runtime.check.measures_norm = True
        parameters = list(gpt2.parameters())
        assert runtime.check.norm(parameters) is None
        gpt2(**batch).loss.backward()
        gpt2(**batch).loss.backward()
        norm = runtime.check.norm(parameters)
        assert norm is not None
        assert torch.equal(norm, nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]))
        nn.utils.clip_grad_norm_(parameters, 1e-3)
        assert runtime.check.norm(parameters) is None

    def test_the_norm_is_not_that_of_more_gradients_than_there_are(self, gpt2: GPT2LMHeadModel, batch: Batch) -> None:
        runtime = MixedPrecision("fp16")
        runtime.attach(gpt2)
        runtime.check.measures_norm = True
        gpt2(**batch).loss.backward()
        assert runtime.check.norm(list(gpt2.transformer.h.parameters())) is None
        gpt2.transformer.wte.weight.grad = None
        assert runtime.check.norm(list(gpt2.parameters())) is None

    def test_bfloat16_has_no_headroom_to_tell_of(self, gpt2: GPT2LMHeadModel, batch: Batch) -> None:
        runtime = MixedPrecision("bf16")
        runtime.attach(gpt2)
        runtime.check.measures_norm = True
        optimizer = runtime.attach_optimizer(torch.optim.SGD(gpt2.parameters(), lr=0.1))
        gpt2(**batch).loss.backward()
        assert runtime.check.norm(list(gpt2.parameters())) is not None
        optimizer.step()
        assert runtime.stats.headroom is None


class TestPrepare:
    def test_settings_of_the_runtime(self, gpt2: GPT2LMHeadModel) -> None:
        scaler = DynamicLossScaler(max_scale=2.0**24)
        hf_mp.prepare(gpt2, torch.optim.SGD(gpt2.parameters(), lr=0.1), loss_scaler=scaler, tables="cuda")
        assert runtime_of(gpt2).scaler is scaler
        assert runtime_of(gpt2).region.tables == "cuda"

    def test_a_loop_is_told_of_a_skipped_step(self, gpt2: GPT2LMHeadModel, batch: Batch) -> None:
        model, optimizer = hf_mp.prepare(gpt2, torch.optim.SGD(gpt2.parameters(), lr=0.1))
        skips = []
        for factor in (1.0, float("inf"), 1.0):
            (model(**batch).loss * factor).backward()
            optimizer.step()
            optimizer.zero_grad()
            skips.append(optimizer.step_was_skipped)
        assert skips == [False, True, False]
        runtime_of(gpt2).detach()
        assert not hasattr(optimizer, "step_was_skipped")

    def test_bad_input(self, gpt2: GPT2LMHeadModel) -> None:
        optimizer = torch.optim.SGD(gpt2.parameters(), lr=0.1)
        with pytest.raises(TypeError, match="not SGD and GPT2LMHeadModel"):
            hf_mp.prepare(optimizer, gpt2)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="not GPT2LMHeadModel and list; several optimizers"):
            hf_mp.prepare(gpt2, [optimizer])  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="no parameter of this SGD belongs to the attached GPT2LMHeadModel"):
            hf_mp.prepare(gpt2, torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1))


@pytest.mark.parametrize("scheduler", [False, True], ids=["bare", "scheduler"])
def test_torchs_scaler_in_front_of_a_guarded_optimizer_is_refused(
    gpt2: GPT2LMHeadModel, batch: Batch, scheduler: bool
) -> None:
    model, optimizer = hf_mp.prepare(gpt2, torch.optim.SGD(gpt2.parameters(), lr=0.1))
    if scheduler:
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(model(**batch).loss).backward()
    with pytest.raises(RuntimeError, match=r"a torch.amp.GradScaler steps the optimizer of an attached model"):
        scaler.step(optimizer)


def test_training_without_a_guard_is_warned_of_once(gpt2: GPT2LMHeadModel, batch: Batch) -> None:
    MixedPrecision("fp16").attach(gpt2)
    optimizer = torch.optim.SGD(gpt2.parameters(), lr=0.1)
    with pytest.warns(UserWarning, match=r"an optimizer that it does not know.*attach_optimizer") as caught:
        for _ in range(4):
            gpt2(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert len([warning for warning in caught if "does not know" in str(warning.message)]) == 1


def test_a_state_that_is_no_mapping_is_refused() -> None:
    runtime = MixedPrecision("fp16")
    with pytest.raises(TypeError, match="a mixed precision state is a mapping, not a list"):
        runtime.load_state_dict([1])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="the state of a loss scaler is a mapping, not a list"):
        runtime.scaler.load_state_dict([1])  # type: ignore[arg-type]


def test_gradients_of_zero_have_no_headroom_to_log(gpt2: GPT2LMHeadModel, batch: Batch) -> None:
    model, optimizer = hf_mp.prepare(gpt2, torch.optim.SGD(gpt2.parameters(), lr=0.1))
    (model(**batch).loss * 0.0).backward()
    optimizer.step()
    assert "headroom" not in runtime_of(gpt2).stats.log_entries()


# Gradients that come to no good


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize("write", [lambda g: g.data.fill_(torch.nan), lambda g: g.numpy().fill(torch.nan)])
def test_a_gradient_written_so_that_no_version_counter_rises_is_looked_at(
    gpt2: GPT2LMHeadModel, batch: Batch, precision: str, write: Any
) -> None:
    runtime = MixedPrecision(precision)
    optimizer = runtime.attach_optimizer(torch.optim.AdamW(runtime.attach(gpt2).parameters(), lr=0.1))
    gpt2(**batch).loss.backward()
    write(next(gpt2.parameters()).grad)
    optimizer.step()
    assert runtime.step_was_skipped and all(parameter.isfinite().all() for parameter in gpt2.parameters())


@pytest.mark.parametrize("measures_norm", [False, True])
def test_a_gradient_too_large_to_be_squared_is_an_overflow(
    gpt2: GPT2LMHeadModel, batch: Batch, measures_norm: bool
) -> None:
    runtime = MixedPrecision("bf16")
    runtime.check.measures_norm = measures_norm
    optimizer = runtime.attach_optimizer(torch.optim.AdamW(runtime.attach(gpt2).parameters(), lr=0.1))
    (gpt2(**batch).loss * 1e25).backward()
    assert all(parameter.grad.isfinite().all() for parameter in gpt2.parameters() if parameter.grad is not None)
    optimizer.step()
    assert runtime.step_was_skipped and not optimizer.state
    gpt2.zero_grad()
    gpt2(**batch).loss.backward()
    optimizer.step()
    assert not runtime.step_was_skipped


def test_the_error_names_gradients_too_large_to_be_squared(gpt2: GPT2LMHeadModel, batch: Batch) -> None:
    runtime = MixedPrecision("bf16", loss_scaler=StaticLossScaler(1.0, max_consecutive_skips=2))
    optimizer = runtime.attach_optimizer(torch.optim.AdamW(runtime.attach(gpt2).parameters(), lr=0.1))
    for step in range(2):
        (gpt2(**batch).loss * 1e25).backward()
        if step == 0:
            optimizer.step()
            gpt2.zero_grad()
    with pytest.raises(LossScaleError, match=r"not finite: transformer\.wte\.weight \(.*e\+2\d squared\)"):
        optimizer.step()
