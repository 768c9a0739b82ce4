"""Every gradient crosses one border: whatever comes in or goes out, and by whatever way."""

from __future__ import annotations

import collections
import copy
import gc
import threading
import types
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from transformers import GPT2Config, GPT2LMHeadModel

import hf_mp
from hf_mp import MixedPrecision, StaticLossScaler
from hf_mp.weights.slots import _groups

SCALE = 1024.0
Make = Callable[[], nn.Module]


def attached(model: nn.Module, precision: str = "fp16", scale: float = SCALE) -> MixedPrecision:
    runtime = MixedPrecision(precision, loss_scaler=StaticLossScaler(scale))
    runtime.attach(model)
    return runtime


def assert_true(found: list[Tensor | None], expected: list[Tensor | None], tolerance: float = 0.05) -> None:
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            assert (one.float() - other).norm() <= tolerance * other.norm() + 1e-6, (one, other)


def gradients_of(model: nn.Module, loss: Callable[[], Tensor], others: tuple[Tensor, ...] = ()) -> list[Tensor | None]:
    leaves = [*model.parameters(), *others]
    for leaf in leaves:
        leaf.grad = None
    loss().backward()
    return [None if leaf.grad is None else leaf.grad.clone() for leaf in leaves]


def check(
    model: nn.Module, loss: Callable[[], Tensor], others: tuple[Tensor, ...] = (), precision: str = "fp16"
) -> None:
    """The gradients of ``loss`` are those of FP32 once ``model`` is attached, in its first and second forward."""
    expected = gradients_of(model, loss, others)
    runtime = attached(model, precision)
    for _ in range(2):
        assert_true(gradients_of(model, loss, others), expected)
    runtime.detach()


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 2)

    def hidden(self, x: Tensor) -> Tensor:
        return torch.tanh(self.first(x))

    def forward(self, x: Tensor) -> Any:
        return self.second(self.hidden(x))


X = torch.randn(16, 6, generator=torch.Generator().manual_seed(3))


class Slotted:
    __slots__ = ("deep", "value")

    def __init__(self, value: Tensor) -> None:
        self.value, self.deep = value, [value * 2]


class Plain:
    def __init__(self, value: Tensor) -> None:
        self.value, self.me = value, self


@dataclass
class Record:
    value: Tensor


def normal(y: Tensor) -> torch.distributions.Normal:
    return torch.distributions.Normal(y, F.softplus(y) + 0.1)


OUTPUTS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "distribution": (normal, lambda d: -d.log_prob(torch.ones(2)).mean() / 4),
    "independent": (
        lambda y: torch.distributions.Independent(normal(y), 1),
        lambda d: -d.log_prob(torch.ones(2)).mean() / 4,
    ),
    "object": (Plain, lambda o: o.me.value.pow(2).sum()),
    "slots": (Slotted, lambda o: (o.value * o.deep[0]).sum()),
    "set": (lambda y: {y}, lambda s: next(iter(s)).pow(2).sum()),
    "deque": (lambda y: collections.deque([y], maxlen=3), lambda d: d[0].pow(2).sum()),
    "namespace": (lambda y: types.SimpleNamespace(value=y), lambda o: o.value.pow(2).sum()),
    "dataclass in a list": (lambda y: [Record(y)], lambda o: o[0].value.pow(2).sum()),
    "object in a mapping": (lambda y: {"a": (Plain(y),)}, lambda o: o["a"][0].value.pow(2).sum()),
}


@pytest.mark.parametrize("name", OUTPUTS)
def test_outputs_in_objects(name: str) -> None:
    wrap, loss = OUTPUTS[name]

    class Model(Body):
        def forward(self, x: Tensor) -> Any:
            return wrap(self.second(self.hidden(x)))

    model = Model()
    check(model, lambda: loss(model(X)))


def test_a_task_whose_output_is_a_distribution_is_learnt() -> None:
    class Model(Body):
        def forward(self, x: Tensor) -> Any:
            return torch.distributions.Normal(self.second(self.hidden(x)), 1.0)

    def losses(precision: str) -> tuple[float, float]:
        torch.manual_seed(0)
        model = Model()
        target = torch.stack([X.sum(1), X[:, 0]], 1) / 4
        _, optimizer = hf_mp.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05), precision)
        values = []
        for _ in range(100):
            optimizer.zero_grad()
            loss = -model(X).log_prob(target).mean()
            loss.backward()
            optimizer.step()
            values.append(loss.item())
        return values[0], values[-1]

    first, last = losses("fp16")
    assert last == pytest.approx(losses("fp32")[1], abs=2e-3) and last < first - 0.05


def test_a_tensor_that_is_stashed_and_not_returned_has_its_true_gradient_and_a_warning() -> None:
    class Model(Body):
        def forward(self, x: Tensor) -> None:
            self.kept = self.second(self.hidden(x))

    model = Model()

    def loss() -> Tensor:
        model(X)
        return model.kept.float().pow(2).sum()

    with pytest.warns(UserWarning, match=r"none came in through its outputs.*return it"):
        check(model, loss)


class Gated(Body):
    gate: Any = None

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate() if callable(self.gate) else self.gate
        return self.second(self.hidden(x) * (gate[0] if isinstance(gate, list) else gate))


@pytest.mark.parametrize("way", ["attribute", "list", "closure", "object", "leaf attribute", "leaf in a list"])
def test_tensors_with_grad_that_come_in_other_than_by_arguments(way: str) -> None:
    model, hypernet, z = Gated(), nn.Linear(3, 6), torch.randn(3)
    leaf = torch.randn(6, requires_grad=True)

    def loss() -> Tensor:
        gate = leaf if way.startswith("leaf") else torch.sigmoid(hypernet(z))
        if way == "closure":
            object.__setattr__(model, "gate", lambda: gate)
        else:
            wrapped = {"object": types.SimpleNamespace(__getitem__=0)}.get(way, gate)
            object.__setattr__(model, "gate", [gate] if "list" in way else wrapped if way == "object" else gate)
            if way == "object":
                holder = types.SimpleNamespace(value=gate)
                object.__setattr__(model, "gate", lambda: holder.value)
        return model(X).float().pow(2).sum()

    others = (leaf,) if way.startswith("leaf") else tuple(hypernet.parameters())
    check(model, loss, others)


def test_an_input_inside_of_an_object() -> None:
    class Model(Body):
        def forward(self, batch: Any) -> Tensor:
            return self.second(self.hidden(batch.x * batch.more["y"]))

    model, encoder = Model(), nn.Linear(6, 6)

    def loss() -> Tensor:
        batch = Plain(X)
        batch.x, batch.more = encoder(X), {"y": encoder(X + 1)}
        return model(batch).float().pow(2).sum()

    check(model, loss, tuple(encoder.parameters()))


def test_functional_call_with_tensors_that_are_no_parameters() -> None:
    model, shift = Body(), torch.full((2,), 0.5, requires_grad=True)

    def loss() -> Tensor:
        weights = {name: p * 1.5 for name, p in model.named_parameters()}
        weights["second.bias"] = shift
        return torch.func.functional_call(model, weights, (X,)).float().pow(2).sum()

    expected = gradients_of(model, loss, (shift,))
    attached(model)
    for _ in range(2):
        assert_true(gradients_of(model, loss, (shift,)), expected)


class Returning(Body):
    def __init__(self) -> None:
        super().__init__()
        self.temperature, self.prototypes = nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.randn(3, 2))

    def forward(self, x: Tensor) -> Any:
        return self.second(self.hidden(x)), self.temperature, {"prototypes": self.prototypes}


@pytest.mark.parametrize("precision", ["fp16", "fp16-lean", "bf16"])
def test_a_bare_parameter_may_be_returned(precision: str) -> None:
    model = Returning()

    def loss() -> Tensor:
        y, temperature, more = model(X)
        return (F.softmax(y.float() @ more["prototypes"].t() / temperature, -1)[:, 0]).sum()

    check(model, loss, precision=precision)


def test_a_model_that_returns_what_it_was_given() -> None:
    class Identity(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.unused = nn.Parameter(torch.ones(1))

        def forward(self, x: Tensor) -> Tensor:
            return x

    model, x = Identity(), torch.randn(3, requires_grad=True)
    check(model, lambda: model(x).pow(2).sum(), (x,))


PARAMETRIZED: dict[str, Callable[[nn.Module], nn.Module]] = {
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
    "old weight_norm": torch.nn.utils.weight_norm,
    "old spectral_norm": torch.nn.utils.spectral_norm,
}


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("precision", ["fp16", "fp16-lean", "bf16"])
@pytest.mark.parametrize("name", PARAMETRIZED)
def test_parametrized_layers(name: str, precision: str) -> None:
    if (name, precision) == ("orthogonal", "fp16-lean"):
        pytest.skip("torch has no matrix exponential of FP16 weights")
    torch.manual_seed(1)
    model = nn.Sequential(PARAMETRIZED[name](nn.Linear(6, 6)), nn.Tanh(), nn.Linear(6, 2)).eval()
    check(model, lambda: model(X).float().pow(2).sum(), precision=precision)


def test_low_rank_updates_and_tied_autoencoders() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.up, self.down = nn.Linear(6, 4), nn.Parameter(torch.randn(4, 2)), nn.Linear(6, 2)
            self.back = nn.Parameter(torch.zeros(6))

        def forward(self, x: Tensor) -> Tensor:
            code = torch.tanh(F.linear(x, self.linear.weight + self.up @ self.down.weight, self.linear.bias))
            return F.linear(code, self.linear.weight.t(), self.back)

    model = Model()
    check(model, lambda: (model(X) - X).float().pow(2).sum())


@pytest.mark.parametrize("precision", ["fp16", "fp16-lean", "bf16"])
def test_a_frozen_half_base_with_trained_biases(precision: str) -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 2))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("bias" in name)
        parameter.data = parameter.data.half().float()  # the same values in both
    expected = gradients_of(model, lambda: model(X).pow(2).sum())
    attached(model.half(), precision)
    for _ in range(2):
        assert_true(gradients_of(model, lambda: model(X.half()).float().pow(2).sum()), expected)


# Models within models


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_a_part_of_an_attached_model_is_attached_as_well(precision: str) -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(6, 6), nn.Tanh()), nn.Linear(6, 2))
    loss = lambda: model(X).float().pow(2).sum()  # noqa: E731
    part = lambda: model[0](X).float().pow(2).sum()  # noqa: E731
    expected, expected_part = gradients_of(model, loss), gradients_of(model, part)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    hf_mp.prepare(model, optimizer, precision, loss_scaler=StaticLossScaler(SCALE))
    hf_mp.prepare(model[0], torch.optim.SGD(model[0].parameters(), lr=0.0), precision)
    for _ in range(2):
        assert_true(gradients_of(model, loss), expected)
        assert_true(gradients_of(model, part), expected_part)
        optimizer.step()
        assert not optimizer.step_was_skipped


def test_an_attached_model_that_is_called_inside_of_another() -> None:
    inner = Body()

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(inner(x))

    outer = Outer()
    loss = lambda: outer(X).float().pow(2).sum()  # noqa: E731
    others = tuple(inner.parameters())
    expected = gradients_of(outer, loss, others)
    attached(inner, scale=64.0)
    attached(outer)
    for _ in range(2):
        assert_true(gradients_of(outer, loss, others), expected)


def test_a_layer_that_two_default_models_share_has_the_sum_of_both_gradients() -> None:
    shared = nn.Linear(6, 6)
    one, other = nn.Sequential(shared, nn.Linear(6, 2)), nn.Sequential(shared, nn.Linear(6, 2))
    loss = lambda: one(X).float().pow(2).sum() + other(X).float().abs().sum()  # noqa: E731
    others = tuple(other.parameters())
    expected = gradients_of(one, loss, others)
    attached(one)
    attached(other, scale=8.0)
    assert_true(gradients_of(one, loss, others), expected)


def test_a_layer_of_a_lean_model_is_refused_in_another_one() -> None:
    shared = nn.Linear(6, 6)
    one, other = nn.Sequential(shared, nn.Linear(6, 2)), nn.Sequential(shared, nn.Linear(6, 2))
    attached(one, "fp16-lean")
    for precision in ("fp16-lean", "fp16"):
        with pytest.raises(ValueError, match=r"0\.weight is in the lean layout of another model.*default layout"):
            attached(other, precision)


def test_one_optimizer_over_two_attached_models_skips_for_both() -> None:
    one, other = nn.Linear(6, 2), nn.Linear(6, 2)
    optimizer = torch.optim.SGD([*one.parameters(), *other.parameters()], lr=0.1)
    hf_mp.prepare(one, optimizer, "fp16")
    hf_mp.prepare(other, optimizer, "fp16")
    before = [p.detach().clone() for p in (*one.parameters(), *other.parameters())]
    for factor, skipped in ((float("inf"), True), (1.0, False)):
        optimizer.zero_grad()
        (one(X).sum() + other(X).sum() * factor).backward()
        optimizer.step()
        assert optimizer.step_was_skipped is skipped
        after = [p.detach() for p in (*one.parameters(), *other.parameters())]
        assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True)) is skipped


# What a model differentiates itself


@pytest.mark.parametrize("create_graph", [True, False])
def test_a_model_that_differentiates_inside_of_its_forward(create_graph: bool) -> None:
    class Forces(Body):
        def forward(self, x: Tensor) -> Tensor:
            position = x.clone().requires_grad_()
            energy = self.second(self.hidden(position)).float().pow(2).sum()
            (force,) = torch.autograd.grad(energy, position, create_graph=create_graph)
            return force if create_graph else force.sum() + self.second(self.hidden(x))

    model = Forces()
    expected = model(X).detach()
    loss = lambda: model(X).float().pow(2).mean()  # noqa: E731
    reference = gradients_of(model, loss)
    runtime = attached(model)
    assert (model(X) - expected).norm() <= 0.02 * expected.norm()
    for _ in range(2):
        assert_true(gradients_of(model, loss), reference)
    runtime.detach()


def test_what_lies_in_the_place_of_a_weight_is_no_parameter() -> None:
    class Model(Body):
        def forward(self, x: Tensor) -> Tensor:
            assert not isinstance(self.second.weight, nn.Parameter)
            with pytest.raises(AttributeError, match="is not an nn"):
                self.second.get_parameter("weight")
            return self.second(self.hidden(x))

    model = Model()
    MixedPrecision("fp16").attach(model)
    model(X)
    assert isinstance(model.second.weight, nn.Parameter)


WAYS_TO_A_WEIGHT: dict[str, Callable[[nn.Module], Tensor]] = {
    "attribute": lambda module: module.weight,  # type: ignore[dict-item, return-value]
    "_parameters": lambda module: module._parameters["weight"],  # type: ignore[dict-item, return-value]
    "parameters()": lambda module: next(module.parameters(recurse=False)),
    "named_parameters()": lambda module: dict(module.named_parameters())["weight"],
    "state_dict()": lambda module: module.state_dict(keep_vars=True)["weight"],
}


@pytest.mark.parametrize("way", WAYS_TO_A_WEIGHT)
def test_an_autograd_function_of_ones_own_is_given_a_weight(way: str) -> None:
    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
            ctx.save_for_backward(x, weight)
            return x @ weight.to(x.dtype)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
            x, weight = ctx.saved_tensors
            return gradient.float() @ weight.t(), x.t() @ gradient.float()

    class Model(Body):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(6, 6))

        def forward(self, x: Tensor) -> Tensor:
            return self.second(Product.apply(self.hidden(x).float(), WAYS_TO_A_WEIGHT[way](self)))

    model = Model()
    check(model, lambda: model(X).float().pow(2).sum())
    assert all(isinstance(weight, nn.Parameter) for weight in model.parameters())


def test_a_state_that_is_carried_from_one_forward_to_the_next() -> None:
    class Recurrent(Body):
        state: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.hidden(x if self.state is None else x + self.state)
            self.state = hidden
            return self.second(hidden)

    model = Recurrent()

    def loss() -> Tensor:
        model.state = None
        model(X)
        return model(X).float().pow(2).sum() + model(X).float().abs().sum()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check(model, loss)


def test_weights_that_a_forward_writes_are_honoured() -> None:
    class Clipped(Body):
        def forward(self, x: Tensor) -> Tensor:
            self.first.weight.data.clamp_(-0.1, 0.1)
            self.second.weight.data = self.second.weight.data.sign() / 8
            return self.second(self.hidden(x))

    model, reference = Clipped(), Clipped()
    reference.load_state_dict(model.state_dict())
    attached(model)
    for _ in range(2):
        found, expected = model(X), reference(X)
        assert (found - expected).norm() <= 0.01 * expected.norm()
    for one, other in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(one, other)
    assert all(isinstance(p, nn.Parameter) for p in model.parameters())
    assert "weight" not in vars(model.first)


def pair_of(*layers: nn.Module, precision: str = "fp16") -> tuple[nn.Module, nn.Module]:
    reference = nn.Sequential(*layers)
    model = copy.deepcopy(reference)
    hf_mp.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), precision)
    return model, reference


class TestThreads:
    def test_a_backward_that_ends_elsewhere_leaves_this_one_scaled(self) -> None:
        class Held(torch.autograd.Function):
            hold = staticmethod(lambda: None)

            @staticmethod
            def forward(ctx: Any, x: Tensor) -> Tensor:
                return x.clone()

            @staticmethod
            def backward(ctx: Any, gradient: Tensor) -> Tensor:
                Held.hold()
                return gradient

        class Holding(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return Held.apply(x)

        model, reference = pair_of(nn.Linear(8, 8), Holding(), nn.Linear(8, 1))
        x, reached, go_on = torch.randn(4, 8), threading.Event(), threading.Event()
        model(x).sum().backward()
        model.zero_grad()
        reference(x).sum().backward()
        loss = model(x).sum()
        other = model(x).sum()
        Held.hold = staticmethod(lambda: (reached.set(), go_on.wait(10)))
        thread = threading.Thread(target=loss.backward)
        thread.start()
        assert reached.wait(10)
        Held.hold = staticmethod(lambda: None)
        other.backward()
        go_on.set()
        thread.join()
        for found, expected in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(found.grad, 2 * expected.grad, rtol=0.01, atol=0.01)  # type: ignore[operator]

    def test_an_argument_that_another_thread_made_is_outside(self) -> None:
        model, reference = pair_of(nn.Linear(8, 1))
        before = nn.Linear(8, 8)
        for _ in range(50):
            hidden = before(torch.ones(4, 8))  # autograd numbers nodes by thread
        thread = threading.Thread(target=lambda: model(hidden).sum().backward())
        thread.start()
        thread.join()
        found = before.weight.grad
        before.zero_grad()
        reference(before(torch.ones(4, 8))).sum().backward()
        torch.testing.assert_close(found, before.weight.grad, rtol=0.01, atol=0.01)


class TestWithoutBorders:
    def test_a_part_of_a_model_that_is_gone_trains_as_an_ordinary_model(self) -> None:
        inner = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=16, n_positions=8))
        ids = torch.arange(8)[None]
        outer = nn.Sequential(inner)
        MixedPrecision("bf16").attach(outer)
        parts = [inner, copy.deepcopy(inner)]
        del outer
        gc.collect()
        for part in parts:
            part(input_ids=ids, labels=ids).loss.backward()
            assert all(parameter.grad is not None for parameter in part.parameters())

    def test_vmap_gives_every_weight_its_gradient(self) -> None:
        model, reference = pair_of(nn.Linear(8, 8), nn.LayerNorm(8))
        x = torch.randn(4, 8)
        for each in (model, reference):
            torch.func.vmap(each)(x)[:, 0].square().sum().backward()
        for found, expected in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(found.grad, expected.grad, rtol=0.02, atol=0.02)


def test_a_step_in_the_middle_of_a_scaled_backward_is_refused() -> None:
    model, _ = pair_of(nn.Linear(8, 8), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.forward.runtime.attach_optimizer(optimizer)
    handle = model[1].weight.register_post_accumulate_grad_hook(lambda _: optimizer.step())
    with pytest.raises(RuntimeError, match=r"step\(\) was called in a backward.*free_gradients='backward'"):
        model(torch.randn(4, 8)).sum().backward()
    handle.remove()
    model.zero_grad()
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    assert not optimizer.step_was_skipped


def test_attaching_that_fails_leaves_nothing_attached() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    runtime = MixedPrecision("fp16", rules={"nosuch": "fp32"})
    with pytest.raises(ValueError, match="nosuch"):
        runtime.attach(model)
    assert runtime.model is None and "forward" not in model.__dict__
    MixedPrecision("fp16").attach(model)


def test_a_shared_weight_is_watched_on_when_one_of_its_models_is_detached() -> None:
    shared = nn.Linear(8, 8)
    first, second = nn.Sequential(shared), nn.Sequential(shared, nn.Tanh())
    runtimes = [MixedPrecision("fp16") for _ in range(2)]
    for runtime, model in zip(runtimes, (first, second), strict=True):
        runtime.attach(model)
        model(torch.ones(2, 8))
    runtimes[0].detach()
    shared.weight.data.zero_()
    shared.bias.data.zero_()
    assert not second(torch.ones(2, 8)).any()


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("change", ["resize", "double", "another model"])
def test_weights_whose_copies_must_be_made_anew_are_brought_in(change: str, precision: str) -> None:
    model = nn.Sequential(nn.Linear(4, 8, bias=False), nn.Linear(8, 4, bias=False))
    runtime = attached(model, precision)
    for _ in range(2):
        model(torch.randn(2, 4)).sum().backward()
    model.zero_grad()
    if change == "resize":
        model[1].weight.data = torch.randn(10, 8)
    elif change == "double":
        model.double()
    else:
        runtime.detach()
        attached(model, precision)
    x = torch.randn(2, 4, dtype=model[0].weight.dtype)
    model(x).sum().backward()
    expected = torch.ones(2, model[1].weight.shape[0], dtype=x.dtype).t() @ (x @ model[0].weight.detach().t())
    assert_true([model[1].weight.grad], [expected])


def test_gradients_of_a_batch_of_directions() -> None:
    model = nn.LayerNorm(6)
    attached(model)
    x = torch.randn(3, 6)
    output = model(x)
    directions = torch.eye(18).view(18, 3, 6)[:4]
    found = torch.autograd.grad(output, list(model.parameters()), directions, is_grads_batched=True, retain_graph=True)
    one_by_one = [torch.autograd.grad(output, list(model.parameters()), d, retain_graph=True) for d in directions]
    for together, apart in zip(found, zip(*one_by_one, strict=True), strict=True):
        torch.testing.assert_close(together, torch.stack(apart))


@pytest.mark.parametrize(
    ("sizes", "elements", "expected"),
    [
        ([3, 3, 3], 10, [[3, 3, 3]]),
        ([3, 10, 3, 4, 3], 10, [[10], [3, 3, 4], [3]]),
        ([3, 3], 1, [[3], [3]]),
        ([], 10, []),
    ],
)
def test_weights_share_a_border_up_to_so_many_elements(
    sizes: list[int], elements: int, expected: list[list[int]]
) -> None:
    groups = list(_groups([(torch.zeros(size), None) for size in sizes], elements))
    assert [[weight.numel() for weight, _ in group] for group in groups] == expected


def test_weights_of_two_devices_share_no_border() -> None:
    weights = [torch.zeros(2), torch.zeros(2, device="meta"), torch.zeros(2, device="meta")]
    assert [len(group) for group in _groups([(weight, None) for weight in weights], 100)] == [1, 2]
