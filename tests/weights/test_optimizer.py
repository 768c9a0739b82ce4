"""``MasterWeightOptimizer`` against the same optimizer on FP32 parameters, over the optimizers that people use."""

from __future__ import annotations

import copy
import functools
import io
import pickle
import warnings
from collections.abc import Callable
from itertools import cycle
from typing import Any

import bitsandbytes as bnb
import pytest
import torch
import transformers.optimization
from covering import covering
from tiny import copies, masters_around, same
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from hf_mp import DynamicLossScaler, MasterWeightOptimizer
from hf_mp.kernels.split import split
from hf_mp.weights.master_weight_optimizer import steps_by_parameter
from hf_mp.weights.split_parameter import SplitParameter

DTYPES = [torch.float16, torch.bfloat16]
LAYOUTS = ["whole", "split"]
every_layout = pytest.mark.parametrize("layout", LAYOUTS)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)

Make = Callable[[list[nn.Parameter]], Optimizer]


class Around(Optimizer):
    """Steps one inside it, with a state of that one's own, and keeps averages in a dictionary by parameter."""

    def __init__(self, inner: Optimizer) -> None:
        self.inner = inner
        super().__init__(inner.param_groups, {})
        self.numbers = {id(p): 0 for p in inner.param_groups[0]["params"]}  # a tensor's hash
        self.averages = {p: p.detach().clone() for group in self.param_groups for p in group["params"]}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.inner.step()
        for parameter in self.param_groups[0]["params"]:
            parameter.copy_(self.averages[parameter].lerp_(parameter, 0.5))


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


def shapes() -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(shape, generator=generator) for shape in [(32, 16), (16,), (4, 4), ()]]


def parameters(values: list[Tensor], dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    return [nn.Parameter(value.to(dtype, copy=True)) for value in values]


def gradients(step: int, dtype: torch.dtype, likes: list[Tensor]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return [torch.randn(like.shape, generator=generator).to(dtype) for like in likes]


def set_gradients(params: list[nn.Parameter], given: list[Any]) -> None:
    for parameter, gradient in zip(params, given, strict=True):
        parameter.grad = None if gradient is None else gradient.to(parameter.dtype, copy=True)


def assert_same(ours: list[nn.Parameter], wrapper: MasterWeightOptimizer, reference: list[nn.Parameter]) -> None:
    for parameter, expected in zip(ours, reference, strict=True):
        is_split, value = isinstance(parameter, SplitParameter), expected.detach()
        assert torch.equal(wrapper.master(parameter), value)
        rounded = split(value, parameter.dtype).working if is_split else value.to(parameter.dtype)
        assert torch.equal(parameter.detach(), rounded)


class Pair:
    """Parameters in ``dtype`` with the wrapper, and FP32 parameters of the same values with the bare optimizer."""

    def __init__(self, make: Make, layout: Any, dtype: torch.dtype, values: list[Tensor] | None = None) -> None:
        values = [value.to(dtype).float() for value in (shapes() if values is None else values)]
        self.ours, self.reference, self.dtype = parameters(values, dtype), parameters(values), dtype
        self.wrapper, self.bare = masters_around(make(self.ours), layout), make(self.reference)
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


def test_an_optimizer_that_steps_by_a_list_of_its_own_is_told_so() -> None:
    class OwnList(SGD):
        def __init__(self, params: list[nn.Parameter]) -> None:
            super().__init__(params, lr=0.1)
            self.weights = params

    with pytest.warns(UserWarning, match=r"OwnList.weights lists 16-bit parameters.*param_groups, or use 'fp16'"):
        MasterWeightOptimizer(OwnList(parameters(shapes(), torch.float16)))
    optimizer: Any = SGD(parameters(shapes(), torch.float16), lr=0.1)
    optimizer.weights = optimizer.param_groups[0]["params"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        MasterWeightOptimizer(optimizer)


@every_layout
def test_an_optimizer_inside_another_keeps_its_state(layout: str) -> None:
    pair = Pair(lambda p: Around(SGD(p, lr=0.1, momentum=0.9)), layout, torch.float16)
    for step in range(6):
        pair.step(step)
    pair.check()
    assert pair.wrapper.optimizer.inner.state.keys() == set(pair.ours)  # type: ignore[attr-defined]


@pytest.mark.parametrize(("name", "layout", "dtype"), covering(TORCH, LAYOUTS, DTYPES))
def test_equals_the_optimizer_on_fp32(name: str, layout: str, dtype: torch.dtype) -> None:
    pair = Pair(TORCH[name], layout, dtype)
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


@every_layout
@pytest.mark.parametrize("name", ["Adagrad", "AdamW", "AdamW fused", "SGD momentum", "bnb AdamW8bit", "RAdam"])
def test_parts_of_a_step_are_a_step(name: str, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_mp.weights.master_weight_optimizer._BUCKET_ELEMENTS", 20)
    test_equals_the_optimizer_on_fp32(name, layout, torch.float16)


@every_layout
def test_a_closure_with_an_optimizer_that_needs_none(layout: Any) -> None:
    pair = Pair(TORCH["SGD"], layout, torch.float16)
    given = gradients(0, torch.float16, pair.ours)

    def closure_of(params: list[nn.Parameter]) -> float:
        assert torch.is_grad_enabled()
        set_gradients(params, given)
        return 1.5

    for params, optimizer in pair.sides:
        assert optimizer.step(functools.partial(closure_of, params)) == 1.5
    pair.check()


@every_layout
def test_sparse_gradients(layout: Any) -> None:
    value = torch.randn(6, 4).half().float()
    for make in (lambda p: torch.optim.SparseAdam(p, lr=0.1), lambda p: SGD(p, lr=0.1)):
        ours, reference = nn.Embedding(6, 4, sparse=True), nn.Embedding(6, 4, sparse=True)
        ours.weight.data, reference.weight.data = value.half(), value.clone()
        wrapper, bare = masters_around(make(ours.parameters()), layout), make(reference.parameters())
        for _ in range(3):
            for module, optimizer in ((ours, wrapper), (reference, bare)):
                module(torch.tensor([1, 1, 4])).sum().backward()
                assert optimizer.param_groups[0]["params"][0].grad.is_sparse
                optimizer.step()
                optimizer.zero_grad()
        assert_same([ours.weight], wrapper, [reference.weight])


# What master weights are for


@every_layout
@every_dtype
@pytest.mark.parametrize("name", ["SGD", "AdamW fused"])
def test_small_updates_move_weights_as_in_fp32_and_not_at_all_without(
    layout: str, dtype: torch.dtype, name: str
) -> None:
    make: Make = lambda p: SGD(p, lr=1e-4)  # noqa: E731
    if name != "SGD":
        make = lambda p: AdamW(p, lr=1e-4, weight_decay=0, fused=True)  # noqa: E731
    ours, reference, without = (parameters([torch.ones(8)], d) for d in (dtype, torch.float32, dtype))
    optimizers = masters_around(make(ours), layout), make(reference), make(without)  # type: ignore
    for _ in range(100):
        for params, optimizer in zip((ours, reference, without), optimizers, strict=True):
            set_gradients(params, [torch.ones(8)])
            optimizer.step()
    assert torch.equal(optimizers[0].master(ours[0]), reference[0].detach())
    assert ours[0].detach().float().sub(0.99).abs().max() < torch.finfo(dtype).eps
    assert torch.equal(without[0].detach(), torch.ones(8, dtype=dtype))


@every_layout
def test_gradients_are_freed_by_the_split_step_only(layout: Any) -> None:
    pair = Pair(TORCH["SGD"], layout, torch.float16)
    pair.step()
    assert all((p.grad is None) == (layout == "split") for p in pair.ours)


# Groups, schedulers, frozen parameters


@every_layout
def test_groups_and_added_groups(layout: Any) -> None:
    def make(params: list[nn.Parameter]) -> Optimizer:
        return AdamW([{"params": params[:1], "lr": 1e-2}, {"params": params[1:2], "weight_decay": 0.5}], lr=1e-3)

    pair = Pair(make, layout, torch.bfloat16)
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


@every_layout
@pytest.mark.parametrize("when", ["before", "after"])
def test_lr_schedulers(layout: Any, when: str) -> None:
    made: list[Any] = []

    def schedule(optimizer: Optimizer) -> None:
        made.append(torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step))

    def make(params: list[nn.Parameter]) -> Optimizer:
        optimizer = SGD(params, lr=1.0)
        if when == "before" or params[0].dtype is torch.float32:
            schedule(optimizer)
        return optimizer

    pair = Pair(make, layout, torch.float16, [torch.ones(4)])
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


@every_layout
@pytest.mark.parametrize("name", ["AdamW", "SGD momentum", "bnb AdamW8bit", "transformers Adafactor"])
def test_parameters_without_gradient_stay_as_they_are(layout: Any, name: str) -> None:
    pair = Pair(TORCH[name], layout, torch.float16)
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


@every_layout
def test_fp32_parameters_among_the_others(layout: Any) -> None:
    ours, reference = [torch.ones(4).half(), torch.ones(4)], parameters([torch.ones(4)] * 2)
    ours = [nn.Parameter(value) for value in ours]
    wrapper, bare = masters_around(AdamW(ours, lr=1e-4), layout), AdamW(reference, lr=1e-4)
    for params, optimizer in ((ours, wrapper), (reference, bare)):
        for _ in range(3):
            set_gradients(params, [torch.ones(4)] * 2)
            optimizer.step()
    assert torch.equal(ours[1].detach(), reference[1].detach())
    assert torch.equal(wrapper.master(ours[1]), wrapper.master(ours[0]))
    assert type(ours[1]) is nn.Parameter


@every_layout
def test_writes_from_outside_win(layout: Any) -> None:
    pair = Pair(TORCH["SGD"], layout, torch.float16)
    for step in range(3):
        pair.step(step)
        with torch.no_grad():
            for params, _ in pair.sides:
                params[0].data[3] = 0.5
                params[1].fill_(0.25)
        pair.check()


# Clipping


@every_layout
@every_dtype
def test_clip_grad_norm_is_that_of_torch(layout: Any, dtype: torch.dtype) -> None:
    pair = Pair(TORCH["SGD"], layout, dtype)
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
    wrapper = masters_around(SGD(ours, lr=1.0), "split")
    assert isinstance(parameter, SplitParameter)
    for drop in (wrapper.zero_grad, lambda: setattr(parameter, "grad", None)):
        parameter.store_scaled_gradient(torch.full((4,), 100.0).half())
        wrapper.clip_grad_norm_(1.0)
        drop()  # as after a skipped step
    parameter.store_scaled_gradient(torch.full((4,), 0.5).half())
    wrapper.step()
    assert torch.equal(wrapper.master(parameter), torch.full((4,), 0.5))


# Hooks


@every_layout
@pytest.mark.parametrize("when", ["before", "after"])
def test_hooks_fire_once_a_step_and_see_the_parameters(layout: Any, when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_mp.weights.master_weight_optimizer._BUCKET_ELEMENTS", 20)  # in several parts
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
    wrapper = masters_around(inner, layout)
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


def test_stepping_the_wrapped_optimizer_directly_is_refused() -> None:
    ours = parameters(shapes(), torch.float16)
    inner = AdamW(ours)
    wrapper = MasterWeightOptimizer(inner)
    set_gradients(ours, gradients(0, torch.float16, ours))
    with pytest.raises(RuntimeError, match=r"this AdamW was stepped itself, but"):
        inner.step()
    wrapper.step()
    with pytest.raises(RuntimeError, match=r"call step\(\) of the optimizer"):
        inner.step()
    with pytest.raises(ValueError, match="closure failed"):
        wrapper.step(lambda: (_ for _ in ()).throw(ValueError("closure failed")))
    assert all(a is b for a, b in zip(wrapper.param_groups[0]["params"], ours, strict=True))
    with pytest.raises(RuntimeError, match=r"call step\(\) of the optimizer"):
        inner.step()


# Under accelerate, and in the explicit style


@every_layout
def test_the_explicit_style_of_torch_amp(layout: Any) -> None:
    value = torch.randn(4, 4).half()
    ours, reference = parameters([value], torch.float16), parameters([value.float()])
    wrapper, bare = masters_around(SGD(ours, lr=0.1), layout), SGD(reference, lr=0.1)
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


@every_layout
def test_torchs_scaler_unscales_for_a_fused_optimizer_inside(layout: Any) -> None:
    optimizer = masters_around(SGD(parameters([torch.ones(4)], torch.float16), lr=0.1, fused=True), layout)
    (parameter,) = optimizer.param_groups[0]["params"]
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale((parameter * torch.full((4,), 0.25, dtype=torch.float16)).sum().float()).backward()
    if layout == "whole":
        with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
            scaler.step(optimizer)
        return
    scaler.step(optimizer)
    assert torch.equal(optimizer.master(parameter), torch.full((4,), 1 - 0.1 * 0.25))


# Saving and loading


def trained(make: Make, layout: Any, dtype: torch.dtype) -> tuple[list[nn.Parameter], Any]:
    pair = Pair(make, layout, dtype)
    for step in range(3):
        pair.step(step)
    return pair.ours, pair.wrapper


def through_file(state: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)


@pytest.mark.parametrize(("name", "order"), [*zip(TORCH, cycle(["model first", "optimizer first"]), strict=False)])
def test_a_saved_run_goes_on_bit_for_bit(name: str, order: str) -> None:
    dtype = torch.float16
    ours, wrapper = trained(TORCH[name], "whole", dtype)
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


@every_dtype
def test_whole_masters_are_taken_into_a_lean_layout(dtype: torch.dtype) -> None:
    (parameter,) = ours = parameters([torch.zeros(10_000)], dtype)
    wrapper = MasterWeightOptimizer(SGD(ours, lr=1.0))
    ticks = torch.tensor([1 + 2.0**-11, 1 + 3 * 2.0**-11, 1 + 2.0**-8, 1 + 3 * 2.0**-8])  # half way to the next
    parameter.grad_dtype = None
    parameter.grad = -torch.cat([torch.randn(9996), ticks])
    wrapper.step()
    fresh = parameters([parameter.detach().clone()], dtype)
    again = masters_around(SGD(fresh, lr=1.0), "split")
    again.load_state_dict(wrapper.state_dict())
    assert_same(fresh, again, [nn.Parameter(wrapper.master(parameter))])


def test_a_parameter_that_was_written_after_loading_wins() -> None:
    ours, wrapper = trained(TORCH["AdamW"], "whole", torch.float16)
    state, expected = wrapper.state_dict(), wrapper.master(ours[0]).clone()
    again_params = [nn.Parameter(p.detach().clone()) for p in ours]
    again = MasterWeightOptimizer(AdamW(again_params, lr=1e-3))
    again.load_state_dict(state)
    with torch.no_grad():
        again_params[0][0] = 2.5
    assert torch.equal(again.master(again_params[0])[0], torch.full((16,), 2.5))
    assert torch.equal(again.master(again_params[0])[1:], expected[1:])


@every_layout
def test_the_state_of_a_bare_optimizer_and_back(layout: Any) -> None:
    pair = Pair(TORCH["AdamW"], layout, torch.float16)
    set_gradients(pair.reference, gradients(0, torch.float32, pair.reference))
    pair.bare.step()
    pair.wrapper.load_state_dict(pair.bare.state_dict())
    state = pair.wrapper.state_dict()
    assert torch.equal(state["state"][0]["exp_avg"], pair.bare.state_dict()["state"][0]["exp_avg"])
    AdamW(parameters(shapes())).load_state_dict(state)


def test_masters_that_do_not_fit_are_refused() -> None:
    _, wrapper = trained(TORCH["AdamW"], "whole", torch.float16)
    state = wrapper.state_dict()
    for index, tensor, message in (
        (0, torch.zeros(2, 2), r"masters\[0\] is torch.float32 of shape \(2, 2\), but .* of shape \(32, 16\)"),
        (9, torch.zeros(2), r"masters\[9\] is .* of shape \(2,\), but .* of shape None: load the state of this model"),
        (1, torch.zeros(16, dtype=torch.int16), r"masters\[1\] is torch.int16 of .* an FP32 master of shape \(16,\)"),
    ):
        before = [wrapper.master(p).clone() for p in wrapper.param_groups[0]["params"]]
        with pytest.raises(ValueError, match=message):
            wrapper.load_state_dict({**state, "masters": {**state["masters"], index: tensor}})
        after = [wrapper.master(p) for p in wrapper.param_groups[0]["params"]]
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    with pytest.raises(ValueError, match="masters is a float, not a mapping"):
        wrapper.load_state_dict({**state, "masters": 1.5})
    with pytest.raises(ValueError, match="different number of parameter groups"):
        wrapper.load_state_dict({**state, "param_groups": []})
    assert all(p.dtype is torch.float16 for p in wrapper.param_groups[0]["params"])


class Averaging(torch.optim.SGD):
    """Has methods that write parameters with what its state holds, as schedule-free optimizers."""

    @torch.no_grad()
    def eval(self) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.lerp_(end=self.state[parameter]["z"], weight=0.5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_other_methods_of_the_optimizer_run_on_masters(dtype: torch.dtype) -> None:
    weight = nn.Parameter(torch.ones(8, dtype=dtype))
    optimizer = Averaging([weight], lr=0.1)
    wrapper = MasterWeightOptimizer(optimizer)
    wrapper.state[weight]["z"] = torch.full((8,), 1.0 + 2.0**-14)
    wrapper.eval()
    assert torch.equal(wrapper.master(weight), torch.full((8,), 1.0 + 2.0**-15)) and weight.dtype is dtype


@pytest.mark.parametrize("how", [copy.deepcopy, pickle.dumps])
def test_copies_and_pickles_of_the_wrapper_are_refused(how: Any) -> None:
    with pytest.raises(TypeError, match=r"not copied or pickled: wrap another"):
        how(trained(TORCH["AdamW"], "whole", torch.float16)[1])


# bitsandbytes' settings


@every_layout
def test_module_overrides_of_bitsandbytes_are_found(layout: Any) -> None:
    model = nn.Sequential(nn.Embedding(64, 64), nn.Linear(64, 64, bias=False)).half()
    manager = bnb.optim.GlobalOptimManager.get_instance()
    manager.register_module_override(model[0], "weight", {"optim_bits": 32})
    wrapper = masters_around(bnb.optim.AdamW8bit(model.parameters(), min_8bit_size=64), layout)
    set_gradients(list(model.parameters()), [torch.randn(64, 64)] * 2)
    wrapper.step()
    assert wrapper.state[model[0].weight]["state1"].dtype is torch.float32
    assert wrapper.state[model[1].weight]["state1"].dtype is torch.uint8


# Which optimizers may step in parts


def test_a_subclass_with_a_step_of_its_own_is_stepped_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_mp.weights.master_weight_optimizer._BUCKET_ELEMENTS", 1)
    counts: list[int] = []

    class Renamed(SGD):
        pass

    class Global(SGD):
        def step(self, closure: Any = None) -> None:
            counts.append(sum(p.grad is not None for group in self.param_groups for p in group["params"]))

    ours = parameters([torch.ones(2)] * 3, torch.float16)
    assert steps_by_parameter(Renamed(ours)) and steps_by_parameter(AdamW(ours))
    wrapper = masters_around(Global(ours), "split")
    assert not steps_by_parameter(wrapper.optimizer)
    set_gradients(ours, [torch.ones(2)] * 3)
    wrapper.step()
    assert counts == [3]


# Bad input


def test_bad_input_is_refused() -> None:
    ours = parameters([torch.ones(2)], torch.float16)
    with pytest.raises(TypeError, match="MasterWeightOptimizer wraps"):
        MasterWeightOptimizer("SGD")  # type: ignore[arg-type]
    integers = nn.Parameter(torch.ones(2, dtype=torch.int64), requires_grad=False)
    with pytest.raises(TypeError, match=r"for floating parameters"):
        MasterWeightOptimizer(SGD([*ours, integers]))
    wrapper = MasterWeightOptimizer(SGD(ours))
    with pytest.raises(ValueError, match="LBFGS calls its closure several times"):
        MasterWeightOptimizer(torch.optim.LBFGS(ours))
    with pytest.raises(TypeError, match="is a MasterWeightOptimizer already: wrap"):
        MasterWeightOptimizer(wrapper)
    with pytest.raises(TypeError, match="for floating parameters"):
        wrapper.add_param_group({"params": [integers]})


def test_fp32_parameters_alone_are_warned_about() -> None:
    ours = parameters([torch.ones(2)])
    with pytest.warns(UserWarning, match="MasterWeightOptimizer has nothing to do"):
        wrapper = MasterWeightOptimizer(SGD(ours, lr=1.0))
    ours[0].grad = torch.ones(2)
    wrapper.step()
    assert torch.equal(ours[0].detach(), torch.zeros(2))


@every_layout
def test_gradients_may_stay_as_zeros(layout: str) -> None:
    optimizer = masters_around(SGD([nn.Parameter(torch.ones(3).half())], lr=0.1), layout)
    (parameter,) = optimizer.param_groups[0]["params"]
    (parameter * 2).sum().backward()
    optimizer.zero_grad(set_to_none=False)
    assert parameter.grad is not None and not parameter.grad.any()
    optimizer.step()
    assert torch.equal(optimizer.master(parameter), torch.ones(3))


@every_layout
def test_a_step_that_somebody_has_put_on_the_wrapped_optimizer_is_called(layout: str) -> None:
    calls, wrapped = [], SGD([nn.Parameter(torch.ones(3).half())], lr=0.25)
    original = wrapped.step
    wrapped.step = lambda: calls.append(original())  # type: ignore[assignment, misc]
    optimizer = masters_around(wrapped, layout)
    (parameter,) = optimizer.param_groups[0]["params"]
    (parameter * 2).sum().backward()
    optimizer.step()
    assert len(calls) == 1 and torch.equal(optimizer.master(parameter), torch.full((3,), 0.5))
