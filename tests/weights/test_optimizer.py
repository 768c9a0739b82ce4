"""``MasterWeightOptimizer`` against the same optimizer on FP32 parameters, over the optimizers that people use."""

from __future__ import annotations

import copy
import functools
import io
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import bitsandbytes as bnb
import pytest
import torch
import transformers.optimization
from tiny import copies, same, take_step
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from hf_mp import DynamicLossScaler, MasterWeightOptimizer
from hf_mp.kernels.split import split
from hf_mp.weights.lean.optimizer import steps_by_parameter
from hf_mp.weights.lean.split_parameter import SplitParameter, make_split
from hf_mp.weights.lean.unwrapped_steps import refuse_unwrapped_steps

DTYPES = [torch.float16, torch.bfloat16]
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)

Make = Callable[[list[nn.Parameter]], Optimizer]

TORCH: dict[str, Make] = {
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=0.1),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01, initial_accumulator_value=0.125),
    "Adagrad fused": lambda p: torch.optim.Adagrad(p, lr=0.01, fused=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=1e-3, weight_decay=0.01),
    "Adam amsgrad foreach": lambda p: torch.optim.Adam(p, lr=1e-3, amsgrad=True, foreach=True),
    "Adam fused": lambda p: torch.optim.Adam(p, lr=1e-3, fused=True),
    "Adam tensor lr": lambda p: torch.optim.Adam(p, lr=torch.tensor(1e-3)),
    "AdamW": lambda p: AdamW(p, lr=1e-3),
    "AdamW foreach": lambda p: AdamW(p, lr=1e-3, foreach=True),
    "AdamW fused": lambda p: AdamW(p, lr=1e-3, fused=True),
    "AdamW maximize": lambda p: AdamW(p, lr=1e-3, maximize=True),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=1e-3),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.01),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=1e-3),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=1e-3),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.9),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=1e-3),
    "SGD": lambda p: SGD(p, lr=0.1),
    "SGD momentum": lambda p: SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "SGD fused": lambda p: SGD(p, lr=0.1, momentum=0.9, fused=True),
    "SGD foreach maximize": lambda p: SGD(p, lr=0.1, weight_decay=0.1, foreach=True, maximize=True),
    "transformers Adafactor": lambda p: transformers.optimization.Adafactor(p),
    "transformers Adafactor lr": lambda p: transformers.optimization.Adafactor(
        p, lr=1e-3, scale_parameter=False, relative_step=False, beta1=0.9
    ),
    "bnb AdamW8bit": lambda p: bnb.optim.AdamW8bit(p, lr=1e-3, min_8bit_size=64),
    "bnb Adam8bit": lambda p: bnb.optim.Adam8bit(p, lr=1e-3, min_8bit_size=64),
    "bnb Lion8bit": lambda p: bnb.optim.Lion8bit(p, lr=1e-3, min_8bit_size=64),
    "bnb AdamW": lambda p: bnb.optim.AdamW(p, lr=1e-3),
    "bnb Lion": lambda p: bnb.optim.Lion(p, lr=1e-3),
    "bnb AdamW8bit large only": lambda p: bnb.optim.AdamW8bit(p, lr=1e-3),
}
every_optimizer = pytest.mark.parametrize("name", TORCH)


def shapes() -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(shape, generator=generator) for shape in [(32, 16), (16,), (4, 4), ()]]


def parameters(values: list[Tensor], dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    """Those of a lean model, unless they are FP32."""
    made = [nn.Parameter(value.to(dtype, copy=True)) for value in values]
    for parameter in made if dtype in DTYPES else ():
        make_split(parameter, dtype)
    return made


def gradients(step: int, dtype: torch.dtype, likes: list[Tensor]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return [torch.randn(like.shape, generator=generator).to(dtype) for like in likes]


def set_gradients(params: list[nn.Parameter], given: list[Any]) -> None:
    for parameter, gradient in zip(params, given, strict=True):
        parameter.grad = None if gradient is None else gradient.to(parameter.dtype, copy=True)


def assert_same(ours: list[nn.Parameter], wrapper: MasterWeightOptimizer, reference: list[nn.Parameter]) -> None:
    for parameter, expected in zip(ours, reference, strict=True):
        assert torch.equal(wrapper.master(parameter), expected.detach())
        assert torch.equal(parameter.detach(), split(expected.detach(), parameter.dtype).working)


class Pair:
    """Parameters in ``dtype`` with the wrapper, and FP32 parameters of the same values with the bare optimizer."""

    def __init__(self, make: Make, dtype: torch.dtype, values: list[Tensor] | None = None) -> None:
        values = [value.to(dtype).float() for value in (shapes() if values is None else values)]
        self.ours, self.reference, self.dtype = parameters(values, dtype), parameters(values), dtype
        self.wrapper, self.bare = MasterWeightOptimizer(make(self.ours)), make(self.reference)
        self.sides: list[tuple[list[nn.Parameter], Any]] = [(self.ours, self.wrapper), (self.reference, self.bare)]

    def step(self, number: int = 0, given: list[Any] | None = None) -> None:
        """Of both, with gradients that both have alike."""
        given = gradients(number, self.dtype, self.ours) if given is None else given
        for params, optimizer in self.sides:
            set_gradients(params, given)
            optimizer.step()

    def check(self) -> None:
        assert_same(self.ours, self.wrapper, self.reference)


# The same mathematics as FP32, bit for bit


@every_optimizer
@every_dtype
def test_equals_the_optimizer_on_fp32(name: str, dtype: torch.dtype) -> None:
    pair = Pair(TORCH[name], dtype)
    for step in range(6):
        pair.step(step)
        pair.wrapper.zero_grad()
        pair.bare.zero_grad()
        if step == 0:
            assert not any(torch.equal(p.detach(), v) for p, v in zip(pair.reference, shapes(), strict=True))
    pair.check()
    for left, right in zip(pair.wrapper.state.values(), pair.bare.state.values(), strict=True):
        assert left.keys() == right.keys()
        for key in left:
            if isinstance(left[key], Tensor):
                assert left[key].dtype is right[key].dtype and torch.equal(left[key], right[key]), key


@pytest.mark.parametrize("name", ["Adagrad", "AdamW", "AdamW fused", "SGD momentum", "bnb AdamW8bit", "RAdam"])
def test_parts_of_a_step_are_a_step(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_mp.weights.lean.optimizer._BUCKET_ELEMENTS", 20)
    test_equals_the_optimizer_on_fp32(name, torch.float16)


@every_dtype
def test_muon(dtype: torch.dtype) -> None:
    pair = Pair(lambda p: torch.optim.Muon(p, lr=0.01), dtype, [torch.randn(16, 8)])
    for step in range(3):
        pair.step(step)
    pair.check()


def test_a_closure_with_an_optimizer_that_needs_none() -> None:
    pair = Pair(TORCH["SGD"], torch.float16)
    given = gradients(0, torch.float16, pair.ours)

    def closure_of(params: list[nn.Parameter]) -> float:
        assert torch.is_grad_enabled()
        set_gradients(params, given)
        return 1.5

    for params, optimizer in pair.sides:
        assert optimizer.step(functools.partial(closure_of, params)) == 1.5
    pair.check()


def test_sparse_gradients() -> None:
    value = torch.randn(6, 4).half().float()
    for make in (lambda p: torch.optim.SparseAdam(p, lr=0.1), lambda p: SGD(p, lr=0.1)):
        ours, reference = nn.Embedding(6, 4, sparse=True), nn.Embedding(6, 4, sparse=True)
        ours.weight.data, reference.weight.data = value.half(), value.clone()
        make_split(ours.weight, torch.float16)
        wrapper, bare = MasterWeightOptimizer(make(ours.parameters())), make(reference.parameters())
        for _ in range(3):
            for module, optimizer in ((ours, wrapper), (reference, bare)):
                module(torch.tensor([1, 1, 4])).sum().backward()
                assert optimizer.param_groups[0]["params"][0].grad.is_sparse
                optimizer.step()
                optimizer.zero_grad()
        assert_same([ours.weight], wrapper, [reference.weight])


# What master weights are for


@every_dtype
@pytest.mark.parametrize("name", ["SGD", "AdamW fused"])
def test_small_updates_move_weights_as_in_fp32_and_not_at_all_without(dtype: torch.dtype, name: str) -> None:
    make: Make = lambda p: SGD(p, lr=1e-4)  # noqa: E731
    if name != "SGD":
        make = lambda p: AdamW(p, lr=1e-4, weight_decay=0, fused=True)  # noqa: E731
    ours, reference = (parameters([torch.ones(8)], d) for d in (dtype, torch.float32))
    without = [nn.Parameter(torch.ones(8, dtype=dtype))]
    optimizers = MasterWeightOptimizer(make(ours)), make(reference), make(without)  # type: ignore
    for _ in range(100):
        for params, optimizer in zip((ours, reference, without), optimizers, strict=True):
            set_gradients(params, [torch.ones(8)])
            optimizer.step()
    assert torch.equal(optimizers[0].master(ours[0]), reference[0].detach())
    assert ours[0].detach().float().sub(0.99).abs().max() < torch.finfo(dtype).eps
    assert torch.equal(without[0].detach(), torch.ones(8, dtype=dtype))


def test_gradients_are_freed_by_the_step() -> None:
    pair = Pair(TORCH["SGD"], torch.float16)
    pair.step()
    assert all(p.grad is None for p in pair.ours)


# Groups, schedulers, frozen parameters


def test_groups_and_added_groups() -> None:
    def make(params: list[nn.Parameter]) -> Optimizer:
        return AdamW([{"params": params[:1], "lr": 1e-2}, {"params": params[1:2], "weight_decay": 0.5}], lr=1e-3)

    pair = Pair(make, torch.bfloat16)
    wrapper = pair.wrapper
    for number, adds in ((2, (wrapper, pair.bare)), (3, (wrapper.optimizer, pair.bare))):
        for optimizer, params in zip(adds, (pair.ours, pair.reference), strict=True):
            optimizer.add_param_group({"params": params[number : number + 1], "lr": number / 10})
    for step in range(3):
        pair.step(step)
    assert [g["lr"] for g in wrapper.param_groups] == [1e-2, 1e-3, 0.2, 0.3]
    assert wrapper.defaults is wrapper.optimizer.defaults
    assert all(a is b for a, b in zip(pair.ours, (p for g in wrapper.param_groups for p in g["params"]), strict=True))
    pair.check()


@pytest.mark.parametrize("when", ["before", "after"])
def test_lr_schedulers(when: str) -> None:
    made: list[Any] = []

    def schedule(optimizer: Optimizer) -> None:
        made.append(torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step))

    def make(params: list[nn.Parameter]) -> Optimizer:
        optimizer = SGD(params, lr=1.0)
        if when == "before" or params[0].dtype is torch.float32:
            schedule(optimizer)
        return optimizer

    pair = Pair(make, torch.float16, [torch.ones(4)])
    if when == "after":
        schedule(pair.wrapper)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # "lr_scheduler.step() before optimizer.step()"
        for _ in range(3):
            pair.step(given=[torch.full((4,), 0.1)])
            for one in made:
                one.step()
    assert pair.wrapper.param_groups[0]["lr"] == 0.125
    torch.testing.assert_close(pair.wrapper.master(pair.ours[0]), pair.reference[0].detach(), rtol=1e-4, atol=0)


@pytest.mark.parametrize("name", ["AdamW", "SGD momentum", "bnb AdamW8bit", "transformers Adafactor"])
def test_parameters_without_gradient_stay_as_they_are(name: str) -> None:
    pair = Pair(TORCH[name], torch.float16)
    untouched = pair.ours[1].detach().clone()
    for step in range(3):
        given: list[Any] = gradients(step, torch.float16, pair.ours)
        given[1] = None
        if step == 1:
            given[0] = None
        pair.step(given=given)
    assert torch.equal(pair.ours[1].detach(), untouched) and not pair.wrapper.state[pair.ours[1]]
    pair.check()
    pair.wrapper.zero_grad()
    before = copies(pair.ours)
    pair.wrapper.step()
    assert same(before, pair.ours)


def test_freezing_and_unfreezing() -> None:
    pair = Pair(lambda p: AdamW(p, lr=0.1), torch.float16, [torch.ones(3)] * 2)
    for frozen in ((1,), (), (0,)):
        for params, optimizer in pair.sides:
            for index, parameter in enumerate(params):
                parameter.requires_grad_(index not in frozen)
            take_step(sum((p.float() ** 2).sum() for p in params), optimizer)  # type: ignore[arg-type]
    for left, right in zip(pair.ours, pair.reference, strict=True):
        torch.testing.assert_close(pair.wrapper.master(left), right.detach(), rtol=1e-3, atol=0)


def test_fp32_parameters_among_the_others() -> None:
    ours, reference = parameters([torch.ones(4)], torch.float16), parameters([torch.ones(4)] * 2)
    ours.append(nn.Parameter(torch.ones(4)))
    wrapper, bare = MasterWeightOptimizer(AdamW(ours, lr=1e-4)), AdamW(reference, lr=1e-4)
    for params, optimizer in ((ours, wrapper), (reference, bare)):
        for _ in range(3):
            set_gradients(params, [torch.ones(4)] * 2)
            optimizer.step()
    assert torch.equal(ours[1].detach(), reference[1].detach())
    assert torch.equal(wrapper.master(ours[1]), wrapper.master(ours[0]))
    assert type(ours[1]) is nn.Parameter


def test_writes_from_outside_win() -> None:
    pair = Pair(TORCH["SGD"], torch.float16)
    for step in range(3):
        pair.step(step)
        with torch.no_grad():
            for params, _ in pair.sides:
                params[0].data[3] = 0.5
                params[1].fill_(0.25)
        pair.check()


def test_masters_saturate_where_fp16_ends() -> None:
    (parameter,) = ours = parameters([torch.tensor([60000.0, 1.0])], torch.float16)
    wrapper = MasterWeightOptimizer(SGD(ours, lr=1.0))
    parameter.grad = torch.tensor([-20000.0, 0.0]).half()
    wrapper.step()
    assert parameter.detach().tolist() == [65520 - 2**-8, 1.0]


# Clipping


@every_dtype
def test_clip_grad_norm_is_that_of_torch(dtype: torch.dtype) -> None:
    pair = Pair(TORCH["SGD"], dtype)
    wrapper = pair.wrapper
    for step in range(3):
        for params, _ in pair.sides:
            set_gradients(params, gradients(step, dtype, pair.ours))
        measured = wrapper.clip_grad_norm_(float("inf"))
        norm, expected = wrapper.clip_grad_norm_(0.5), nn.utils.clip_grad_norm_(pair.reference, 0.5)
        assert expected > 5 and torch.equal(measured, norm)
        torch.testing.assert_close(norm, expected, rtol=1e-6, atol=0)
        if step == 0:
            for left, right in zip(pair.ours, pair.reference, strict=True):
                torch.testing.assert_close(left.grad.float(), right.grad, rtol=1e-6, atol=0)  # type: ignore
        wrapper.step()
        pair.bare.step()
    for left, right in zip(pair.ours, pair.reference, strict=True):
        torch.testing.assert_close(wrapper.master(left), right.detach(), rtol=1e-6, atol=1e-7)
    wrapper.zero_grad()
    assert wrapper.clip_grad_norm_(1.0).item() == 0.0


def test_clipping_does_not_outlive_the_gradients_it_clipped() -> None:
    (parameter,) = ours = parameters([torch.ones(4)], torch.float16)
    wrapper = MasterWeightOptimizer(SGD(ours, lr=1.0))
    assert isinstance(parameter, SplitParameter)
    for drop in (wrapper.zero_grad, lambda: setattr(parameter, "grad", None)):
        parameter.take_scaled_gradient(torch.full((4,), 100.0).half())
        wrapper.clip_grad_norm_(1.0)
        drop()  # as after a skipped step
    parameter.take_scaled_gradient(torch.full((4,), 0.5).half())
    wrapper.step()
    assert torch.equal(wrapper.master(parameter), torch.full((4,), 0.5))


# Hooks


@pytest.mark.parametrize("when", ["before", "after"])
def test_hooks_fire_once_a_step_and_see_the_parameters(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_mp.weights.lean.optimizer._BUCKET_ELEMENTS", 20)  # in several parts
    ours = parameters(shapes(), torch.float16)
    inner: Optimizer = AdamW(ours)
    calls: list[str] = []

    def note(name: str) -> Callable[..., None]:
        def hook(optimizer: Optimizer, *args: Any) -> None:
            calls.append(name)
            assert optimizer.param_groups[0]["params"][0].shape == (32, 16)

        return hook

    def register(optimizer: Optimizer) -> list[Any]:
        return [
            optimizer.register_step_pre_hook(note("pre")),
            optimizer.register_step_post_hook(note("post")),
            optimizer.register_state_dict_pre_hook(note("saves")),
            optimizer.register_state_dict_post_hook(note("saved")),
        ]

    handles = register(inner) if when == "before" else []
    wrapper = MasterWeightOptimizer(inner)
    handles = handles or register(wrapper)
    with_global = register_optimizer_step_post_hook(note("global"))
    set_gradients(ours, gradients(0, torch.float16, ours))
    try:
        wrapper.step()
    finally:
        with_global.remove()
    assert calls == ["pre", "post", "global"]
    calls.clear()
    wrapper.state_dict()
    assert calls == ["saves", "saved"]
    calls.clear()
    loads = [
        wrapper.register_load_state_dict_pre_hook(lambda o, s: calls.append("loads")),
        wrapper.register_load_state_dict_post_hook(lambda o: calls.append("loaded")),
    ]
    state = wrapper.state_dict()
    calls.clear()
    wrapper.load_state_dict(state)
    assert calls == ["loads", "loaded"]
    for handle in (*handles, *loads):
        handle.remove()
    calls.clear()
    wrapper.load_state_dict(wrapper.state_dict())
    set_gradients(ours, gradients(0, torch.float16, ours))
    wrapper.step()
    assert calls == []


def test_a_step_hook_may_change_the_gradients() -> None:
    ours = parameters([torch.ones(4)], torch.float16)
    wrapper = MasterWeightOptimizer(SGD(ours, lr=1.0))

    def zero(*args: Any) -> None:
        assert ours[0].grad is not None
        ours[0].grad.zero_()

    wrapper.register_step_pre_hook(zero)
    ours[0].grad = torch.ones(4).half()
    wrapper.step()
    assert torch.equal(ours[0].detach(), torch.ones(4).half())


def test_stepping_the_wrapped_optimizer_directly_is_refused() -> None:
    refuse_unwrapped_steps()  # as attaching does
    ours = parameters(shapes(), torch.float16)
    inner = AdamW(ours)
    wrapper = MasterWeightOptimizer(inner)
    set_gradients(ours, gradients(0, torch.float16, ours))
    with pytest.raises(RuntimeError, match=r"this AdamW would round its updates .* step what attach_optimizer"):
        inner.step()
    wrapper.step()
    with pytest.raises(ValueError, match="closure failed"):
        wrapper.step(lambda: (_ for _ in ()).throw(ValueError("closure failed")))
    assert all(a is b for a, b in zip(wrapper.param_groups[0]["params"], ours, strict=True))
    with pytest.raises(RuntimeError, match=r"this AdamW would round its updates"):
        inner.step()


# Under accelerate, and in the explicit style


def test_the_explicit_style_of_torch_amp() -> None:
    value = torch.randn(4, 4).half()
    ours, reference = parameters([value], torch.float16), parameters([value.float()])
    wrapper, bare = MasterWeightOptimizer(SGD(ours, lr=0.1)), SGD(reference, lr=0.1)
    scaler = DynamicLossScaler(init_scale=2.0**10, growth_interval=2)
    x = torch.randn(3, 4).half()
    for _ in range(4):
        for _ in range(2):  # micro-batches
            scaler.scale((x.float() @ ours[0].float()).square().mean()).backward()
            (x.float() @ reference[0].half().float()).square().mean().backward()
        scaler.unscale_(wrapper)
        assert ours[0].grad is not None and ours[0].grad.dtype is torch.float32
        nn.utils.clip_grad_norm_(ours, 0.5)
        nn.utils.clip_grad_norm_(reference, 0.5)
        scaler.step(wrapper)
        scaler.update()
        bare.step()
        wrapper.zero_grad()
        bare.zero_grad()
    assert scaler.get_scale() == 2.0**12
    torch.testing.assert_close(wrapper.master(ours[0]), reference[0].detach(), rtol=1e-3, atol=1e-4)


def test_torchs_scaler_unscales_for_a_fused_optimizer_inside() -> None:
    (parameter,) = ours = parameters([torch.ones(4)], torch.float16)
    optimizer = MasterWeightOptimizer(SGD(ours, lr=0.1, fused=True))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale((parameter * torch.full((4,), 0.25, dtype=torch.float16)).sum().float()).backward()
    scaler.step(optimizer)
    assert torch.equal(optimizer.master(parameter), torch.full((4,), 1 - 0.1 * 0.25))


# Saving and loading


def trained(make: Make, dtype: torch.dtype) -> tuple[list[nn.Parameter], Any]:
    pair = Pair(make, dtype)
    for step in range(3):
        pair.step(step)
    return pair.ours, pair.wrapper


def through_file(state: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)


@every_optimizer
@pytest.mark.parametrize("order", ["model first", "optimizer first"])
def test_a_saved_run_goes_on_bit_for_bit(name: str, order: str) -> None:
    dtype = torch.float16
    ours, wrapper = trained(TORCH[name], dtype)
    saved = through_file({"optimizer": wrapper.state_dict(), "model": [p.detach().clone() for p in ours]})
    fresh = parameters([torch.zeros_like(value) for value in shapes()], dtype)
    again = MasterWeightOptimizer(TORCH[name](fresh))

    def load_model() -> None:
        with torch.no_grad():
            for parameter, value in zip(fresh, saved["model"], strict=True):
                parameter.copy_(value)

    for load in (load_model, lambda: again.load_state_dict(saved["optimizer"]))[:: 1 if order == "model first" else -1]:
        load()
    for step in range(3, 6):
        for params, optimizer in ((ours, wrapper), (fresh, again)):
            set_gradients(params, gradients(step, dtype, params))
            optimizer.step()
        for left, right in zip(ours, fresh, strict=True):
            assert torch.equal(wrapper.master(left), again.master(right))
            assert torch.equal(left.detach(), right.detach())


def test_clipping_with_an_fp64_parameter_among_the_others() -> None:
    half, double = *parameters([torch.zeros(4)], torch.float16), nn.Parameter(torch.zeros(4).double())
    optimizer = MasterWeightOptimizer(SGD([half, double], lr=1.0))
    half.grad, double.grad = torch.full_like(half, 2.0), torch.full_like(double, 1.5)
    assert optimizer.clip_grad_norm_(2.5) == 5.0
    optimizer.step()
    torch.testing.assert_close(half.detach(), torch.full((4,), -1.0).half())
    torch.testing.assert_close(double.detach(), torch.full((4,), -0.75).double(), rtol=1e-6, atol=0.0)


def test_the_norm_of_one_gradient_makes_no_fp32_copy_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_mp.kernels.gradient_scan._BLOCK_ELEMENTS_PER_THREAD", 64)
    (weight,) = parameters([torch.zeros(10_000)], torch.float16)
    optimizer = MasterWeightOptimizer(AdamW([weight], fused=True))
    assert isinstance(weight, SplitParameter)
    gradient = torch.randn(10_000).half()
    weight.take_scaled_gradient(gradient)
    expected = gradient.double().norm().float()
    cast: list[int] = []
    original = torch.linalg.vector_norm

    def spy(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if tensor.dtype is torch.float16:  # torch casts it whole, on a CPU
            cast.append(tensor.numel())
        return original(tensor, *args, **kwargs)

    monkeypatch.setattr(torch.linalg, "vector_norm", spy)
    torch.testing.assert_close(optimizer.clip_grad_norm_(float("inf")), expected, rtol=1e-6, atol=0.0)
    assert cast == []


@pytest.mark.usefixtures("other_default_dtype")
def test_loaded_state_stays_fp32_whatever_the_default_dtype() -> None:
    def make() -> tuple[nn.Parameter, MasterWeightOptimizer]:
        (weight,) = parameters([torch.linspace(-1.0, 1.0, 12, dtype=torch.float16)], torch.float16)
        return weight, MasterWeightOptimizer(AdamW([weight], fused=True))

    weight, optimizer = make()
    weight.grad = torch.linspace(0.1, 0.7, 12, dtype=torch.float16)
    optimizer.step()
    resumed_weight, resumed = make()
    resumed.load_state_dict(optimizer.state_dict())
    for name in ("exp_avg", "exp_avg_sq"):
        found, expected = resumed.state[resumed_weight][name], optimizer.state[weight][name]
        assert found.dtype is torch.float32 and torch.equal(found, expected)


def test_the_state_of_a_bare_optimizer_and_back() -> None:
    pair = Pair(TORCH["AdamW"], torch.float16)
    set_gradients(pair.reference, gradients(0, torch.float32, pair.reference))
    pair.bare.step()
    pair.wrapper.load_state_dict(pair.bare.state_dict())
    state = pair.wrapper.state_dict()
    assert torch.equal(state["state"][0]["exp_avg"], pair.bare.state_dict()["state"][0]["exp_avg"])
    AdamW(parameters(shapes())).load_state_dict(state)


def test_a_state_with_masters_is_refused() -> None:
    _, wrapper = trained(TORCH["AdamW"], torch.float16)
    with pytest.raises(ValueError, match=r"holds 1 FP32 masters, which a lean model keeps itself: .* with copy_"):
        wrapper.load_state_dict({**wrapper.state_dict(), "masters": {0: torch.zeros(32, 16)}})


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies_and_pickles_of_the_wrapper(how: str) -> None:
    ours, wrapper = trained(TORCH["AdamW"], torch.float16)
    if how == "deepcopy":
        params, copied = copy.deepcopy((ours, wrapper))
    else:
        params, copied = pickle.loads(pickle.dumps((ours, wrapper)))
    assert all(a is b for a, b in zip(params, copied.param_groups[0]["params"], strict=True))
    assert not set(params) & set(ours)
    for step in range(3, 6):
        for each, optimizer in ((ours, wrapper), (params, copied)):
            set_gradients(each, gradients(step, torch.float16, ours))
            optimizer.step()
    for left, right in zip(ours, params, strict=True):
        assert torch.equal(wrapper.master(left), copied.master(right))
    assert {parameter.dtype for parameter in params} == {torch.float32}  # as of a copy of a lean model


# bitsandbytes' settings


def test_module_overrides_of_bitsandbytes_are_found() -> None:
    model = nn.Sequential(nn.Embedding(64, 64), nn.Linear(64, 64, bias=False)).half()
    manager = bnb.optim.GlobalOptimManager.get_instance()
    manager.register_module_override(model[0], "weight", {"optim_bits": 32})
    for parameter in model.parameters():
        make_split(parameter, torch.float16)
    wrapper = MasterWeightOptimizer(bnb.optim.AdamW8bit(model.parameters(), min_8bit_size=64))
    set_gradients(list(model.parameters()), [torch.randn(64, 64)] * 2)
    wrapper.step()
    assert wrapper.state[model[0].weight]["state1"].dtype is torch.float32
    assert wrapper.state[model[1].weight]["state1"].dtype is torch.uint8


# Which optimizers may step in parts


def test_a_subclass_with_a_step_of_its_own_is_stepped_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_mp.weights.lean.optimizer._BUCKET_ELEMENTS", 1)
    counts: list[int] = []

    class Renamed(SGD):
        pass

    class Global(SGD):
        def step(self, closure: Any = None) -> None:
            counts.append(sum(p.grad is not None for group in self.param_groups for p in group["params"]))

    ours = parameters([torch.ones(2)] * 3, torch.float16)
    assert steps_by_parameter(Renamed(ours)) and steps_by_parameter(AdamW(ours))
    assert not steps_by_parameter(torch.optim.LBFGS(ours))
    wrapper = MasterWeightOptimizer(Global(ours))
    assert not steps_by_parameter(wrapper.optimizer)
    set_gradients(ours, [torch.ones(2)] * 3)
    wrapper.step()
    assert counts == [3]


# Bad input


def test_bad_input_is_refused() -> None:
    ours = parameters([torch.ones(2)], torch.float16)
    bare = SGD([*ours, nn.Parameter(torch.ones(2).half())])
    with pytest.raises(ValueError, match=r"over 1 FP16 or BF16 parameters of no lean model: .* hf_mp.prepare\("):
        MasterWeightOptimizer(bare)
    with pytest.raises(ValueError, match=r"layout='whole'\) over 0 .*: masters are made for a whole model"):
        MasterWeightOptimizer(SGD(ours), layout="whole")
    with pytest.raises(ValueError, match="LBFGS calls its closure several times in a step"):
        MasterWeightOptimizer(torch.optim.LBFGS(ours))
    for given in (MasterWeightOptimizer(SGD(ours)), ours):
        with pytest.raises(TypeError, match="wraps a bare optimizer, once, not"):
            MasterWeightOptimizer(given)  # type: ignore[arg-type]


def test_repr_names_both() -> None:
    wrapper = MasterWeightOptimizer(SGD(parameters([torch.ones(2)], torch.float16)))
    assert repr(wrapper).startswith("MasterWeightOptimizer(SGD (")
