"""The explicit style of loss scaling beside ``torch.amp.GradScaler`` on a CPU, which is the reference."""

from __future__ import annotations

import copy
import json
import math
import pickle
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from hf_mp import MasterWeightOptimizer, MixedPrecision
from hf_mp.scaling.explicit import _multiply
from hf_mp.scaling.scalers import (
    DynamicLossScaler,
    HeadroomLossScaler,
    LossScaleError,
    LossScaler,
    StaticLossScaler,
)

INF, NAN = math.inf, math.nan
Scaler = torch.amp.GradScaler | LossScaler[Any]
MakeScaler = Callable[..., Scaler]


torchs = partial(torch.amp.GradScaler, "cpu")
ours = partial(DynamicLossScaler, "cpu")
BOTH = pytest.mark.parametrize("make", [torchs, ours], ids=["torch", "ours"])
OURS = pytest.mark.parametrize(
    "make",
    [ours, HeadroomLossScaler, lambda *a, **s: StaticLossScaler(*(a or (64.0,)), **s)],
    ids=["dynamic", "headroom", "static"],
)


def one_weight(value: float = 1.0, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.tensor([value], dtype=dtype))


def backward(scaler: Scaler, weight: Tensor, gradient: float = 1.0) -> None:
    """Give ``weight`` this gradient through the scaled backward."""
    scaler.scale((weight * gradient).sum()).backward()


def train_step(scaler: Scaler, optimizer: Optimizer, weight: Tensor, gradient: float = 1.0) -> None:
    optimizer.zero_grad()
    backward(scaler, weight, gradient)
    finish(scaler, optimizer)


def finish(scaler: Scaler, *optimizers: Optimizer) -> list[Any]:
    """End the iteration; what the optimizers' steps returned."""
    returned = [scaler.step(optimizer) for optimizer in optimizers]
    scaler.update()
    return returned


def torch_state(scaler: Any) -> tuple[Any, ...]:
    """What torch's scaler saves and tells, of either scaler."""
    saved = scaler.state_dict()
    keys = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")
    told = scaler.get_scale(), scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval()
    return *told, *(saved[key] for key in keys)


SMALL_STEPS = partial(SGD, lr=2.0**-10)


class Twins:
    """One weight and its optimizer, twice: under torch's scaler and under ours."""

    def __init__(
        self,
        ours: LossScaler[Any],
        torchs: torch.amp.GradScaler,
        make: Callable[..., Optimizer] = SMALL_STEPS,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.scalers = (torchs, ours)
        self.weights = (one_weight(dtype=dtype), one_weight(dtype=dtype))
        self.optimizers = tuple(make([weight]) for weight in self.weights)

    def step(self, *gradients: float, max_norm: float | None = None) -> None:
        """On micro-batches with these gradients."""
        for scaler, optimizer, weight in zip(self.scalers, self.optimizers, self.weights, strict=True):
            optimizer.zero_grad()
            for gradient in gradients:
                backward(scaler, weight, gradient)
            if max_norm is not None:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_([weight], max_norm)
            finish(scaler, optimizer)

    def check_equal(self) -> None:
        assert torch_state(self.scalers[0]) == torch_state(self.scalers[1])
        assert torch.equal(*self.weights)  # which tells of every decision to skip


SETTERS: dict[str, Callable[[Any, int], None]] = {
    "growth": lambda scaler, number: scaler.set_growth_factor(2.0 + number),
    "backoff": lambda scaler, number: scaler.set_backoff_factor(1.0 / (2.0 + number)),
    # longer: torch's never grows again when the tracker has passed it
    "interval": lambda scaler, number: scaler.set_growth_interval(50 + number),
    "update": lambda scaler, number: scaler.update(33.3 + number),
    "tensor": lambda scaler, number: scaler.update(torch.tensor(16.0 + number)),
}
# Runs of steps of one gradient, or of calls of a setter, so many times.
GRADIENTS_AND_CALLS = [1.0, -0.5, 3.0, 0.0, INF, -INF, NAN, *SETTERS]
RUNS = st.lists(st.tuples(st.sampled_from(GRADIENTS_AND_CALLS), st.integers(1, 40)), min_size=4, max_size=12)


@pytest.mark.filterwarnings("ignore:.*no power of two")
class TestEquivalence:
    @settings(deadline=None, derandomize=True, max_examples=25)
    @given(
        runs=RUNS,
        init_scale=st.one_of(st.integers(0, 30).map(lambda exponent: 2.0**exponent), st.floats(1.0, 1e6)),
        growth=st.one_of(st.just(2.0), st.floats(1.01, 4.0)),
        backoff=st.one_of(st.just(0.5), st.floats(0.1, 0.99)),
        interval=st.integers(1, 50),
        dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    )
    def test_scale_tracker_skips_setters_and_unscaled_gradients_are_torchs(
        self,
        runs: list[tuple[Any, int]],
        init_scale: float,
        growth: float,
        backoff: float,
        interval: int,
        dtype: torch.dtype,
    ) -> None:
        factors = (init_scale, growth, backoff, interval)
        scalers = DynamicLossScaler("cpu", *factors, min_scale=2.0**-126, max_consecutive_skips=10**9), torchs(*factors)
        twins = Twins(*scalers, partial(SGD, lr=2.0**-2), dtype)
        twins.step(1.0)  # torch's takes no new scale before
        for number, (action, length) in enumerate(runs):
            for _ in range(length):
                if action in SETTERS:
                    for scaler in twins.scalers:
                        SETTERS[action](scaler, number)
                else:
                    twins.step(action)
                if not 1.0 <= twins.scalers[0].get_scale() < 2.0**100:
                    return  # torch's scaler left our floor, or gradients overflow FP32
                twins.check_equal()
                unscaled = [weight.grad for weight in twins.weights]
                torch.testing.assert_close(*unscaled, rtol=0, atol=0, equal_nan=True)

    @pytest.mark.parametrize("fused", [False, True], ids=["foreach", "fused"])
    @pytest.mark.parametrize("clip", [False, True], ids=["unclipped", "clipped"])
    def test_200_steps_of_adamw_give_torchs_weights_bit_for_bit(self, fused: bool, clip: bool) -> None:
        scalers = [make(2.0**20, growth_interval=10) for make in (ours, torchs)]
        twins = Twins(*scalers, partial(AdamW, lr=1e-2, fused=fused))
        for step in range(200):
            overflows = step % 37 == 5
            twins.step(math.sin(step), 1e35 if overflows else math.cos(step), max_norm=0.5 if clip else None)
            twins.check_equal()
        assert scalers[0].state.skipped_steps >= 6


class TestOneIteration:
    @BOTH
    def test_several_optimizers_and_losses(self, make: MakeScaler) -> None:
        """Each optimizer is skipped for its own gradients; an overflow in any lowers the one scale once."""
        scaler, weights = make(16.0, growth_interval=2), [one_weight() for _ in range(3)]
        optimizers = [SGD([weight], lr=1.0) for weight in weights]
        first, second = scaler.scale([weights[0].sum() * 2.0, (weights[1] + weights[2] * INF).sum()])
        first.backward()
        second.backward()
        scaler.unscale_(optimizers[1])
        assert weights[1].grad.item() == 1.0 and weights[0].grad.item() == 32.0
        finish(scaler, *optimizers)
        assert [weight.item() for weight in weights] == [-1.0, 0.0, 1.0]
        assert scaler.get_scale() == 8.0 and scaler.state_dict()["_growth_tracker"] == 0

    @BOTH
    def test_what_the_optimizer_returns_and_takes_goes_through(self, make: MakeScaler) -> None:
        """Of an object with groups and a step: wrappers such as accelerate's are no subclasses to count on."""
        scaler, weight = make(4.0), one_weight()
        step = lambda *args, **kwargs: (args, kwargs)  # noqa: E731
        optimizer: Any = SimpleNamespace(param_groups=[{"params": [weight]}], step=step)
        backward(scaler, weight)
        assert scaler.step(optimizer, 1, "two", three=3) == ((1, "two"), {"three": 3})
        scaler.update()
        backward(scaler, weight, INF)
        assert scaler.step(optimizer, 1) is None

    def test_gradients_on_several_devices_are_unscaled_in_one_call_for_each_dtype(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As far as a CPU can tell: with the meta device in the place of accelerators."""
        calls: list[tuple[list[Tensor], float]] = []
        monkeypatch.setattr(torch, "_foreach_mul_", lambda tensors, factor: calls.append((tensors, factor)))
        on_cpu = [torch.ones(2), torch.ones(3, dtype=torch.float64)]
        elsewhere = [torch.ones(number, device="meta") for number in (1, 2)]
        in_bf16 = torch.ones(3, device="meta", dtype=torch.bfloat16)
        _multiply([elsewhere[0], on_cpu[0], in_bf16, on_cpu[1], elsewhere[1]], 0.5)
        assert [[id(tensor) for tensor in tensors] for tensors, _ in calls] == [
            [id(tensor) for tensor in elsewhere],
            [id(in_bf16)],
        ]
        assert {factor for _, factor in calls} == {0.5}
        assert all(tensor.eq(0.5).all() for tensor in on_cpu)


# Gradients of parameters of one optimizer as a scale of 4 leaves them, and whether they are all finite.
SPARSE = torch.sparse_coo_tensor([[1, 1, 2]], [8.0, 12.0, 4.0], (3,), check_invariants=True)
GRADIENTS: dict[str, tuple[list[Tensor | None], bool]] = {
    "none at all": ([None, torch.ones(2)], True),
    "no dimension": ([torch.tensor(4.0)], True),
    "no element": ([torch.ones(0), torch.ones(3, 0)], True),
    "several dtypes": ([torch.ones(2, 3).to(dtype) for dtype in (torch.float32, torch.float64, torch.bfloat16)], True),
    "strides": ([torch.arange(6.0).view(3, 2).t()], True),
    "sparse with duplicates": ([SPARSE, torch.ones(2)], True),
    "sparse and empty": ([torch.zeros(3, 1).to_sparse(1)], True),
    **{
        f"{bad} in {dtype}": ([torch.ones(3), torch.tensor([0.0, 0.0, bad], dtype=dtype)], False)
        for bad in (INF, -INF, NAN)
        for dtype in (torch.float32, torch.float64, torch.bfloat16)
    },
    "sparse inf": ([torch.sparse_coo_tensor([[1]], [INF], (3,), check_invariants=True)], False),
}


@BOTH
@pytest.mark.parametrize(("gradients", "is_finite"), GRADIENTS.values(), ids=GRADIENTS)
def test_gradients_of_every_kind(make: MakeScaler, gradients: list[Tensor | None], is_finite: bool) -> None:
    like = [torch.ones(2) if gradient is None else gradient for gradient in gradients]
    parameters = [nn.Parameter(torch.ones(one.shape, dtype=one.dtype)) for one in like]
    frozen, scaled = one_weight().requires_grad_(False), one_weight()
    scaler, optimizer = make(4.0), SGD([*parameters, frozen, scaled], lr=0.5)
    backward(scaler, scaled)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = None if gradient is None else gradient.clone()
    assert finish(scaler, optimizer) == [None]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        moved = gradient is not None and is_finite
        assert torch.equal(parameter, 1 - gradient.to_dense() / 8 if moved else torch.ones_like(parameter))  # type: ignore[union-attr]
    assert (scaler.get_scale(), frozen.item(), scaled.item()) == ((4.0, 1.0, 0.5) if is_finite else (2.0, 1.0, 1.0))


@pytest.mark.parametrize(
    ("scale", "gradient"),
    [
        (2.0**-10, torch.tensor([0.0, 1e37])),
        (4.0, torch.sparse_coo_tensor([[1] * 16], [2.0**127] * 16, (2,), check_invariants=True)),
    ],
    ids=["unscaled", "a sum of duplicates"],
)
@BOTH
def test_what_overflows_when_it_is_unscaled_skips_here_and_spoils_the_weights_under_torch(
    make: MakeScaler, scale: float, gradient: Tensor
) -> None:
    weight, scaler = nn.Parameter(torch.zeros(2)), make(scale)
    backward(scaler, weight)
    weight.grad = gradient.clone()  # coalescing writes
    finish(scaler, SGD([weight], lr=1.0))
    assert (weight[1].item(), scaler.get_scale()) == ((-INF, scale) if make is torchs else (0.0, scale / 2))


class TestScale:
    @BOTH
    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
    @pytest.mark.parametrize("shape", [(), (2,)], ids=str)
    def test_dtypes_of_what_is_scaled_are_torchs(
        self, make: MakeScaler, dtype: torch.dtype, shape: tuple[int, ...]
    ) -> None:
        scaled = make(4.0).scale(torch.full(shape, 3.0, dtype=dtype))
        expected = torch.float32 if shape == () and dtype.itemsize == 2 else dtype
        assert scaled.dtype is expected and scaled.eq(12.0).all()

    @BOTH
    def test_nested_lists_and_tuples_keep_their_types(self, make: MakeScaler) -> None:
        one = torch.ones(())
        assert make(4.0).scale([one, (one, [one])]) == [4.0, (4.0, [4.0])]
        assert [value.item() for value in make(4.0).scale(number * one for number in range(3))] == [0.0, 4.0, 8.0]

    @pytest.mark.parametrize("outputs", [3.0, None, [torch.ones(()), 3], "loss", {"loss": torch.ones(())}], ids=str)
    def test_anything_else_is_refused(self, outputs: Any) -> None:
        with pytest.raises(ValueError, match="outputs must be a Tensor or an iterable"):
            DynamicLossScaler().scale(outputs)


NOT_SCALED = r"Attempted {0} but _scale is None|{0}\(\) before anything was scaled: did this loop call"
UNCHECKED = "No inf checks were recorded|no gradients were checked"
# Calls, the last of which torch's scaler refuses too; "without": of an optimizer without gradients.
REFUSED: dict[str, tuple[list[str], str]] = {
    "unscale twice": (
        ["backward", "unscale_", "unscale_"],
        r"unscale_\(\) has already been called on this optimizer since the last",
    ),
    "unscale after step": (["backward", "step", "unscale_"], r"unscale_\(\) is being called after step\(\)"),
    "step twice": (["backward", "step", "step"], r"step\(\) has already been called since the last update\(\)"),
    "update alone": (["backward", "update"], UNCHECKED),
    "update after none": (["backward", "unscale_ without", "update"], UNCHECKED),
    "step without": (["backward", "step without"], "No inf checks were recorded|has no gradients: call"),
    "unscale before scale": (["plain backward", "unscale_"], NOT_SCALED.format("unscale_")),
    "step before scale": (["plain backward", "step"], NOT_SCALED.format("step")),
    "update before scale": (["plain backward", "update"], NOT_SCALED.format("update")),
    "a closure": (["backward", "step by closure"], r"(?i)closure.* not (currently )?supported"),
    "pickling within an iteration": (["backward", "unscale_", "pickle"], "pickle"),
    "a backward through a stale scale": (
        ["backward", "new scale", "first backward"],
        "modified by an inplace operation",
    ),
}


class TestRefusals:
    @BOTH
    @pytest.mark.parametrize(("calls", "message"), REFUSED.values(), ids=REFUSED)
    def test_calls_that_torch_refuses_too(self, make: MakeScaler, calls: list[str], message: str) -> None:
        scaler, weight = make(4.0), one_weight()
        optimizer, without, scaled = SGD([weight], lr=1.0), SGD([one_weight()]), list[Tensor]()
        call: dict[str, Callable[[], Any]] = {
            "backward": lambda: scaled.append(scaler.scale(weight.sum())) or scaled[0].backward(retain_graph=True),
            "plain backward": lambda: weight.sum().backward(),
            "first backward": lambda: scaled[0].backward(),
            "unscale_": partial(scaler.unscale_, optimizer),
            "unscale_ without": partial(scaler.unscale_, without),
            "step": partial(scaler.step, optimizer),
            "step without": partial(scaler.step, without),
            "step by closure": partial(scaler.step, optimizer, closure=lambda: None),
            "update": scaler.update,
            "new scale": partial(scaler.update, 8.0),
            "pickle": partial(pickle.dumps, scaler),
        }
        for allowed in calls[:-1]:
            call[allowed]()
        before = weight.item(), weight.grad.item()
        with pytest.raises((AssertionError, RuntimeError), match=message):
            call[calls[-1]]()
        assert (weight.item(), weight.grad.item()) == before

    @pytest.mark.parametrize(
        ("make", "way_out"),
        [(torchs, ""), (ours, r".* Wrap the optimizer in hf_mp\.MasterWeightOptimizer, or keep .* FP32")],
        ids=["torch", "ours"],
    )
    @pytest.mark.parametrize("method", ["unscale_", "step"])
    def test_fp16_gradients_and_none_of_the_others_is_changed(
        self, make: MakeScaler, way_out: str, method: str
    ) -> None:
        weight, half = one_weight(), one_weight(dtype=torch.float16)
        scaler, optimizer = make(4.0), SGD([weight, half])
        backward(scaler, weight)
        half.grad = torch.ones_like(half)
        with pytest.raises(ValueError, match=f"Attempting to unscale FP16 gradients{way_out}"):
            getattr(scaler, method)(optimizer)
        assert weight.grad.item() == 4.0 and half.grad.item() == 1.0

    @pytest.mark.parametrize(
        ("new_scale", "message"),
        [
            *((scale, "a loss scale must be a number from .*, not") for scale in (0.0, -1.0, NAN, INF, True)),
            (torch.tensor(0.0), "a loss scale must be a number from .*, not"),
            (torch.ones(2), r"not one of shape \(2,\) with requires_grad=False"),
            (torch.ones((), requires_grad=True), r"not one of shape \(\) with requires_grad=True"),
        ],
        ids=str,
    )
    def test_a_new_scale_that_is_none(self, new_scale: Any, message: str) -> None:
        scaler = DynamicLossScaler("cpu", 4.0)
        with pytest.raises(ValueError, match=message):
            scaler.update(new_scale)
        assert scaler.get_scale() == 4.0

    @pytest.mark.parametrize("with_scheduler", [False, True], ids=["", "scheduler"])
    def test_an_optimizer_of_an_attached_model_is_free_after_detach(self, with_scheduler: bool) -> None:
        model, runtime, scaler = nn.Linear(2, 1), MixedPrecision("bf16"), DynamicLossScaler("cpu", 4.0)
        runtime.attach(model)
        optimizer = runtime.attach_optimizer(SGD(model.parameters()))
        if with_scheduler:  # wraps step, attributes and all
            torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
        scaler.scale(model(torch.ones(1, 2)).sum()).backward()
        for method in (scaler.unscale_, scaler.step):
            with pytest.raises(
                RuntimeError, match="belongs to an attached model, whose gradients are unscaled already"
            ):
                method(optimizer)
        runtime.detach()
        scaler.step(optimizer)


class TestDisabled:
    @pytest.mark.parametrize(
        "make",
        [
            torchs,
            partial(DynamicLossScaler, min_scale=2.0**16, max_consecutive_skips=1),  # which would give up
            HeadroomLossScaler,
            partial(StaticLossScaler, 64.0),
        ],
        ids=["torch", "dynamic", "headroom", "static"],
    )
    def test_everything_passes_through(self, make: MakeScaler) -> None:
        scaler, weight = make(enabled=False), one_weight()
        optimizer, loss = SGD([weight], lr=1.0), weight.sum()
        assert scaler.scale(loss) is loss and scaler.get_scale() == 1.0 and not scaler.is_enabled()
        loss.backward()
        scaler.unscale_(optimizer)
        scaler.unscale_(optimizer)
        assert scaler.step(optimizer, closure=lambda: "value") == "value" and weight.item() == 0.0
        weight.grad.fill_(NAN)
        scaler.step(optimizer)
        assert weight.isnan().all()
        scaler.update()
        scaler.update(0.0)
        scaler.load_state_dict({})
        assert scaler.state_dict() == {} and getattr(scaler, "state", SimpleNamespace(steps=0)).steps == 0
        assert pickle.loads(pickle.dumps(scaler)).is_enabled() is False


class TestSavedState:
    @pytest.mark.parametrize("used", [True, False], ids=["into-a-used-one", "into-a-new-one"])
    @pytest.mark.parametrize("to_torch", [True, False], ids=["ours-to-torch", "torch-to-ours"])
    def test_it_goes_over_in_both_directions_and_both_go_on_alike(self, to_torch: bool, used: bool) -> None:
        saved = Twins(DynamicLossScaler("cpu", 64.0, 4.0, 0.25, 3), torchs(64.0, 4.0, 0.25, 3))
        for gradient in (1.0, INF, 1.0, 1.0):
            saved.step(gradient)
        source = saved.scalers[1 if to_torch else 0]
        assert source.state_dict()["_growth_tracker"] == 2 and source.get_scale() == 16.0
        state = json.loads(json.dumps(source.state_dict()))
        twins = Twins(DynamicLossScaler("cpu", 2.0), torchs(2.0))
        if used:
            twins.step(1.0)
        for scaler in twins.scalers:
            # each takes over what the other kind of scaler saved; the source's own kind what it saved itself
            scaler.load_state_dict(state)
        twins.check_equal()
        for gradient in [1.0, 1.0, NAN, 1.0, 1.0, 1.0, 1.0]:
            twins.step(gradient)
            saved.step(gradient)
            twins.check_equal()
            assert torch_state(twins.scalers[0]) == torch_state(saved.scalers[0])
        assert twins.scalers[1].get_scale() == 64.0

    @OURS
    def test_ours_through_pickle_and_deepcopy_go_on_alike(self, make: MakeScaler) -> None:
        scaler, weight = make(), one_weight()
        optimizer = SGD([weight], lr=2.0**-12)
        for gradient in (1.0, INF, 3.0):
            train_step(scaler, optimizer, weight, gradient)
        copies = [pickle.loads(pickle.dumps(scaler)), copy.deepcopy(scaler), scaler.copy()]
        for gradient in (2.0, NAN, 1.0):
            for one in (scaler, *copies):
                train_step(one, optimizer, weight, gradient)
        assert scaler.state.steps == 6 and scaler.state.skipped_steps == 2
        assert all(one.state == scaler.state for one in copies)
        assert b"_rebuild_tensor" not in pickle.dumps(scaler)  # so that it loads where this device is not
        held = {id(one.scale_and_inverse(torch.device("cpu")).scale) for one in (scaler, *copies)}
        assert len(held) == 4


class TestOtherScalers:
    def test_headroom_follows_the_largest_of_all_optimizers_before_clipping(self) -> None:
        scaler, weights = HeadroomLossScaler(headroom=5), [one_weight(), one_weight()]
        optimizers = [SGD([weight], lr=1.0) for weight in weights]
        for weight, gradient in zip(weights, (4.0, 0.5), strict=True):
            backward(scaler, weight, gradient)
        scaler.unscale_(optimizers[0])
        nn.utils.clip_grad_norm_(weights[:1], 1e-3)
        finish(scaler, *optimizers)
        # 65504 / 4 / 2**5 lies between 2**8 and 2**9
        assert scaler.state.level == 4.0 and scaler.get_scale() == 2.0**8 and scaler.state.steps == 1
        assert weights[0].item() == pytest.approx(1.0 - 1e-3)

    def test_headroom_keeps_its_scale_when_no_gradient_has_an_element(self) -> None:
        scaler, weight = HeadroomLossScaler(), nn.Parameter(torch.ones(0))
        train_step(scaler, SGD([weight]), weight)
        assert scaler.state.level is None and scaler.get_scale() == 2.0**10 and scaler.state.steps == 1

    def test_gradients_of_masters_are_unscaled_in_fp32(self) -> None:
        """FP16 would lose bits of these gradients, or all."""
        half, gradient = one_weight(dtype=torch.float16), 2.0**-25 * (1 + 1 / 1024)
        optimizer = MasterWeightOptimizer(SGD([half], lr=2.0**8))
        scaler, master = DynamicLossScaler("cpu", 2.0**15), torch.ones(1)
        for factor in (1.0, INF, 1.0):
            backward(scaler, half.float())
            half.grad.fill_(gradient * scaler.get_scale() * factor)
            scaler.unscale_(optimizer)
            assert half.grad.dtype is torch.float32 and half.grad.item() == gradient * factor
            finish(scaler, optimizer)
            optimizer.zero_grad()
            master -= 2.0**8 * gradient if factor == 1.0 else 0.0
            assert torch.equal(optimizer.master(half), master)
        assert scaler.state.skipped_steps == 1 and master.item() != 1.0


def test_giving_up_ends_the_iteration() -> None:
    scaler, weight = StaticLossScaler(4.0, max_consecutive_skips=1), one_weight()
    with pytest.raises(LossScaleError, match=r"are inf or NaN even at loss scale 4"):
        train_step(scaler, SGD([weight], lr=0.5), weight, NAN)
    train_step(scaler, SGD([weight], lr=0.5), weight)
    assert weight.item() == 0.5
