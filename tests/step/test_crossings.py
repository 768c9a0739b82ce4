"""Every gradient is scaled once and unscaled once, however its tensor is passed to the forward or out of it."""

from __future__ import annotations

import collections
import copy
import functools
import threading
import types
import warnings
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from autograd_functions import Rewriting, Times
from tiny import Using, assert_true, attached, check_gradients, copies, gradients_of, same, take_step
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import hf_mp
from hf_mp import MixedPrecision
from hf_mp.diagnostics.overflow import attached_runtime
from hf_mp.weights.slots import _node_groups

X = torch.randn(16, 6, generator=torch.Generator().manual_seed(3))
every_kind = pytest.mark.parametrize("precision", ["fp16", "fp16-lean", "bf16"])


def hidden(m: Any, x: Tensor) -> Tensor:
    return torch.tanh(m.first(x))


def body(use: Callable[..., Any] = lambda m, x: m.second(hidden(m, x)), **parts: Any) -> Any:
    return Using(use, first=nn.Linear(6, 6), second=nn.Linear(6, 2), **parts)


def squared(y: Tensor) -> Tensor:
    return y.float().pow(2).sum()


class Slotted:
    __slots__ = ("deep", "value")

    def __init__(self, value: Tensor) -> None:
        self.value, self.deep = value, [value * 2]


class Plain:
    def __init__(self, value: Tensor) -> None:
        self.value, self.me = value, self


@dataclass(slots=True)
class SlottedRecord:
    value: Tensor


class Named(NamedTuple):
    value: Tensor
    count: int = 3


def normal(y: Tensor) -> torch.distributions.Normal:
    return torch.distributions.Normal(y, F.softplus(y) + 0.1)


def likelihood(d: torch.distributions.Distribution) -> Tensor:
    return -d.log_prob(torch.ones(2)).mean() / 4


OUTPUTS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "distribution": (normal, likelihood),
    "independent": (lambda y: torch.distributions.Independent(normal(y), 1), likelihood),
    "object": (Plain, lambda o: squared(o.me.value)),
    "slots": (Slotted, lambda o: (o.value * o.deep[0]).sum()),
    "named tuple": (Named, lambda o: squared(o.value)),
    "set": (lambda y: {y}, lambda s: squared(next(iter(s)))),
    "deque": (lambda y: collections.deque([y], maxlen=3), lambda d: squared(d[0])),
    "namespace": (lambda y: types.SimpleNamespace(value=y), lambda o: squared(o.value)),
    "namespace in a tuple": (lambda y: (types.SimpleNamespace(value=y), 1), lambda o: squared(o[0].value)),
    "dataclass with slots": (SlottedRecord, lambda o: squared(o.value)),
    "object in a mapping": (lambda y: {"a": (Plain(y),)}, lambda o: squared(o["a"][0].value)),
    "defaultdict": (lambda y: collections.defaultdict(list, a=y), lambda o: squared(o["a"])),
    "mapping proxy": (lambda y: types.MappingProxyType({"a": y}), lambda o: squared(o["a"])),
    "two of one": (lambda y: {"pair": (y, [y * 2])}, lambda o: squared(o["pair"][0]) + squared(o["pair"][1][0])),
}


@pytest.mark.parametrize("name", OUTPUTS)
def test_outputs_in_objects(name: str) -> None:
    wrap, loss = OUTPUTS[name]
    model = body(lambda m, x: wrap(m.second(hidden(m, x))))
    check_gradients(model, lambda: loss(model(X)))


def test_floating_outputs_are_fp32_and_others_as_they_are() -> None:
    model = body(lambda m, x: {"pair": (y := m.first(x), [y * 2]), "count": 3, "ids": torch.tensor([1]), "none": None})
    attached(model)
    out = model(X)
    assert out["pair"][0].dtype is out["pair"][1][0].dtype is torch.float32
    assert out["count"] == 3 and out["ids"].dtype is torch.int64 and out["none"] is None


def test_a_tensor_that_is_stashed_and_not_returned_has_its_true_gradient_and_a_warning() -> None:
    kept: list[Tensor] = []
    model = body(lambda m, x: kept.append(m.second(hidden(m, x))))
    with pytest.warns(UserWarning, match=r"none came in through its outputs.*return it"):
        check_gradients(model, lambda: squared((model(X), kept[-1])[1]))


WAYS_IN: dict[str, Callable[[Tensor], Callable[[], Tensor]]] = {
    "attribute": lambda gate: gate,  # type: ignore[dict-item, return-value]
    "list": lambda gate: [gate],  # type: ignore[dict-item, return-value]
    "closure": lambda gate: lambda: gate,
    "object": lambda gate: (lambda holder: lambda: holder.value)(types.SimpleNamespace(value=gate)),
}


def of_an_object() -> tuple[nn.Module, Callable[[nn.Module], Tensor], Iterable[Tensor]]:
    """Inputs inside of an object, and of a mapping in it."""
    encoder = nn.Linear(6, 6)
    batch = lambda: types.SimpleNamespace(x=encoder(X), more={"y": encoder(X + 1)})  # noqa: E731
    model = body(lambda m, batch: m.second(hidden(m, batch.x * batch.more["y"])))
    return model, lambda model: squared(model(batch())), encoder.parameters()


def of_functional_call() -> tuple[nn.Module, Callable[[nn.Module], Tensor], Iterable[Tensor]]:
    """With tensors that are no parameters."""
    shift = torch.full((2,), 0.5, requires_grad=True)

    def loss(model: nn.Module) -> Tensor:
        weights = {name: p * 1.5 for name, p in model.named_parameters()}
        return squared(torch.func.functional_call(model, weights | {"second.bias": shift}, (X,)))

    return body(), loss, [shift]


def of_what_was_given() -> tuple[nn.Module, Callable[[nn.Module], Tensor], Iterable[Tensor]]:
    """A model that returns what it was given."""
    x = torch.randn(3, requires_grad=True)
    return Using(lambda m, x: x, unused=nn.Parameter(torch.ones(1))), lambda model: squared(model(x)), [x]


def of_another_model() -> tuple[nn.Module, Callable[[nn.Module], Tensor], Iterable[Tensor]]:
    """A model that is attached and called inside of another."""
    inner = body()
    attached(inner, scale=64.0)
    return (
        Using(lambda m, x: m.head(inner(x)), head=nn.Linear(2, 2)),
        lambda model: squared(model(X)),
        inner.parameters(),
    )


def of_a_shared_layer() -> tuple[nn.Module, Callable[[nn.Module], Tensor], Iterable[Tensor]]:
    """Two models of one layer, each attached, add their gradients up."""
    shared = nn.Linear(6, 6)
    one, other = (nn.Sequential(shared, nn.Linear(6, 2)) for _ in range(2))
    attached(other, scale=8.0)
    return one, lambda model: squared(model(X)) + other(X).float().abs().sum(), other[1].parameters()


def of_vmap() -> tuple[nn.Module, Callable[[nn.Module], Tensor], Iterable[Tensor]]:
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8)), lambda model: squared(torch.func.vmap(model)(X)[:, 0]), ()


@pytest.mark.parametrize(
    "make", [of_an_object, of_functional_call, of_what_was_given, of_another_model, of_a_shared_layer, of_vmap]
)
def test_what_comes_in_and_is_added_up(make: Callable[[], Any]) -> None:
    model, loss, others = make()
    check_gradients(model, lambda: loss(model), others)


@pytest.mark.parametrize("is_leaf", [False, True], ids=["computed", "leaf"])
@pytest.mark.parametrize("way", WAYS_IN)
def test_tensors_with_grad_that_come_in_other_than_by_arguments(way: str, is_leaf: bool) -> None:
    def use(m: Any, x: Tensor) -> Tensor:
        gate = m.gate() if callable(m.gate) else m.gate
        return m.second(hidden(m, x) * (gate[0] if isinstance(gate, list) else gate))

    model, hypernet, z, leaf = body(use), nn.Linear(3, 6), torch.randn(3), torch.randn(6, requires_grad=True)

    def loss() -> Tensor:
        object.__setattr__(model, "gate", WAYS_IN[way](leaf if is_leaf else torch.sigmoid(hypernet(z))))
        return squared(model(X))

    check_gradients(model, loss, (leaf,) if is_leaf else hypernet.parameters())


# What a forward does with its weights


def viewed(m: Any, x: Tensor) -> Tensor:
    return (x @ m.matrix.T).mean() + (x + m.shift[1]).mean() + torch.stack([m.shift[2], m.shift[3]]).mean()


def low_rank(m: Any, x: Tensor) -> Tensor:
    code = torch.tanh(F.linear(x, m.linear.weight + m.up @ m.down.weight, m.linear.bias))
    return F.linear(code, m.linear.weight.t(), m.back) - x


def forces(create_graph: bool, in_a_thread: bool = False) -> Callable[[Any, Tensor], Tensor]:
    def use(m: Any, x: Tensor) -> Tensor:
        position = x.clone().requires_grad_()
        energy = squared(m.second(hidden(m, position)))
        gradient = functools.partial(torch.autograd.grad, energy, position, create_graph=create_graph)
        # As on a GPU, whose backward has a thread of its own: autograd numbers the nodes of each thread from 0 on.
        with ThreadPoolExecutor(1) as thread:
            (force,) = thread.submit(gradient).result() if in_a_thread else gradient()
        return force if create_graph else force.sum() + m.second(hidden(m, x))

    return use


def looked_at(y: Tensor) -> Tensor:
    with torch.no_grad():
        assert y.mean().isfinite()
    return y


USES: dict[str, Callable[[], nn.Module]] = {
    "views of weights": lambda: Using(
        viewed, matrix=nn.Parameter(torch.ones(2, 6)), shift=nn.Parameter(torch.ones(5, 6))
    ),
    "bare parameters that are returned": lambda: body(
        lambda m, x: (m.second(hidden(m, x)), m.temperature, {"prototypes": m.prototypes}),
        temperature=nn.Parameter(torch.tensor(2.0)),
        prototypes=nn.Parameter(torch.randn(3, 2)),
    ),
    "low-rank updates and a tied autoencoder": lambda: Using(
        low_rank, linear=nn.Linear(6, 4), up=nn.Parameter(torch.randn(4, 2)), down=nn.Linear(6, 2),
        back=nn.Parameter(torch.zeros(6)),
    ),
    "views made without grad, one of them written": lambda: body(
        lambda m, x: m.second(looked_at(Rewriting.apply(hidden(m, x).float() * 1, m.factor))),
        factor=nn.Parameter(torch.ones(6)),
    ),
    "forces": lambda: body(forces(True)),
    "forces without a graph": lambda: body(forces(False)),
    "forces from another thread": lambda: body(forces(True, in_a_thread=True)),
}  # fmt: skip


def of_what_is_returned(found: Any) -> Tensor:
    if isinstance(found, Tensor):
        return squared(found) / 16
    y, temperature, more = found
    return F.softmax(y.float() @ more["prototypes"].t() / temperature, -1)[:, 0].sum()


@every_kind
@pytest.mark.parametrize("name", USES)
def test_what_is_done_with_weights(name: str, precision: str) -> None:
    torch.manual_seed(0)
    model = USES[name]()
    check_gradients(model, lambda: of_what_is_returned(model(X)), precision=precision)


@every_kind
@pytest.mark.parametrize("is_recomputed", [False, True])
@pytest.mark.parametrize("weight", ["in its module", "tied", "from a closure"])
def test_a_step_of_its_own_inside_of_a_forward(weight: str, is_recomputed: bool, precision: str) -> None:
    def inner_step(m: Any, x: Tensor) -> Tensor:
        of = outside if weight == "from a closure" else m.first.weight
        energy = squared(m.second(hidden(m, x) + (m.tied(x) if weight == "tied" else 0)))
        (gradient,) = torch.autograd.grad(energy, of, create_graph=True)
        assert weight == "from a closure" or m.first.weight is of  # also where a checkpoint was computed again
        return m.second(torch.tanh(F.linear(x, of - gradient / 64, m.first.bias)))

    use = (lambda m, x: checkpoint(inner_step, m, x, use_reentrant=False)) if is_recomputed else inner_step
    model = body(use, tied=nn.Linear(6, 6))
    outside = model.tied.weight = model.first.weight
    # The first forward sums gradients of two products in 16 bits, where later ones give both an FP32 weight.
    differs = weight == "tied" and precision in ("fp16", "bf16")
    check_gradients(model, lambda: squared(model(X)), precision=precision, between=0.01 if differs else 0.0)


@every_kind
def test_a_hook_on_a_weight_meets_gradients_alone_where_checkpoints_are_reentrant(precision: str) -> None:
    model = body(lambda m, x: m.second(checkpoint(lambda x: hidden(m, x), x, use_reentrant=True)))
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient * 0.5)
    check_gradients(model, lambda: squared(model(X.clone().requires_grad_())), precision=precision)


@every_kind
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_whole_attached_model_in_a_checkpoint(use_reentrant: bool, precision: str) -> None:
    model, x = body(), X.clone().requires_grad_()
    check_gradients(model, lambda: squared(checkpoint(model, x, use_reentrant=use_reentrant)), [x], precision)


PARAMETRIZED: dict[str, Callable[[nn.Module], nn.Module]] = {
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
    "old weight_norm": torch.nn.utils.weight_norm,
    "old spectral_norm": torch.nn.utils.spectral_norm,
}


@pytest.mark.filterwarnings("ignore::FutureWarning")
@every_kind
@pytest.mark.parametrize("name", PARAMETRIZED)
def test_parametrized_layers(name: str, precision: str) -> None:
    if (name, precision) == ("orthogonal", "fp16-lean"):
        pytest.skip("torch has no matrix exponential of FP16 weights")
    torch.manual_seed(1)
    model = nn.Sequential(PARAMETRIZED[name](nn.Linear(6, 6)), nn.Tanh(), nn.Linear(6, 2)).eval()
    check_gradients(model, lambda: squared(model(X)), precision=precision)


# Models within models


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_a_part_of_an_attached_model_is_attached_as_well(precision: str) -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(6, 6), nn.Tanh()), nn.Linear(6, 2))
    losses = [lambda: squared(model(X)), lambda: squared(model[0](X))]
    expected = [gradients_of(model, loss) for loss in losses]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    hf_mp.prepare(model, optimizer, precision, loss_scaler=hf_mp.StaticLossScaler(1024.0))
    hf_mp.prepare(model[0], torch.optim.SGD(model[0].parameters(), lr=0.0), precision)
    with warnings.catch_warnings(action="error"):  # both optimizers are attached
        for _ in range(2):
            for loss, gradients in zip(losses, expected, strict=True):
                assert_true(gradients_of(model, loss), gradients)
            optimizer.step()
            assert not optimizer.step_was_skipped


@pytest.mark.parametrize("precision", ["fp16-lean", "fp16"])
def test_a_layer_of_a_lean_model_is_refused_in_another_one(precision: str) -> None:
    shared = nn.Linear(6, 6)
    attached(nn.Sequential(shared), "fp16-lean")
    with pytest.raises(ValueError, match=r"0\.weight is in the lean layout of another model.*default layout"):
        attached(nn.Sequential(shared), precision)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp16-lean", "bf16-lean"])
def test_one_optimizer_over_two_prepared_models_skips_for_both(precision: str, fused: bool) -> None:
    def make() -> tuple[nn.Module, nn.Module, Any]:
        torch.manual_seed(0)
        models = nn.Linear(6, 6), nn.Linear(6, 2)
        parameters = [parameter for model in models for parameter in model.parameters()]
        return *models, torch.optim.AdamW(parameters, lr=0.01, fused=fused)

    def losses(first: nn.Module, second: nn.Module, optimizer: Any, factors: list[float]) -> list[float]:
        return [take_step(second(first(X)).square().sum() * factor, optimizer) for factor in factors]

    expected = losses(*make(), [1.0] * 4)
    first, second, optimizer = make()
    first, optimizer = hf_mp.prepare(first, optimizer, precision)
    second, optimizer = hf_mp.prepare(second, optimizer, precision)
    found = losses(first, second, optimizer, [1.0] * 2)
    before = copies([*first.state_dict().values(), *second.state_dict().values()])
    losses(first, second, optimizer, [float("inf")])
    assert optimizer.step_was_skipped
    assert same([*first.state_dict().values(), *second.state_dict().values()], before)
    found += losses(first, second, optimizer, [1.0] * 2)
    assert found == pytest.approx(expected, rel=0.05) and not optimizer.step_was_skipped
    assert [attached_runtime(model).stats.steps for model in (first, second)] == [5, 5]  # type: ignore[union-attr]


def test_what_lies_in_the_place_of_a_weight_is_no_parameter() -> None:
    def use(m: Any, x: Tensor) -> Tensor:
        assert not isinstance(m.second.weight, nn.Parameter)
        with pytest.raises(AttributeError, match="is not an nn"):
            m.second.get_parameter("weight")
        return m.second(hidden(m, x))

    model = MixedPrecision("fp16").attach(body(use))
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

    model = body(
        lambda m, x: m.second(Product.apply(hidden(m, x).float(), WAYS_TO_A_WEIGHT[way](m))),
        weight=nn.Parameter(torch.randn(6, 6)),
    )
    check_gradients(model, lambda: squared(model(X)))
    assert all(isinstance(weight, nn.Parameter) for weight in model.parameters())


def test_weights_that_a_forward_writes_are_honoured() -> None:
    def use(m: Any, x: Tensor) -> Tensor:
        m.first.weight.data.clamp_(-0.1, 0.1)
        m.second.weight.data = m.second.weight.data.sign() / 8
        return m.second(hidden(m, x))

    model = body(use)
    reference = copy.deepcopy(model)
    attached(model)
    for _ in range(2):
        assert_true([model(X)], [reference(X)], 0.01)
    assert same(model.parameters(), reference.parameters())
    assert all(isinstance(p, nn.Parameter) for p in model.parameters())
    assert "weight" not in vars(model.first)


def test_a_shared_weight_stays_tracked_when_one_of_its_models_is_detached() -> None:
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


class Held(torch.autograd.Function):
    """The identity, whose backward waits when it is told to."""

    hold = staticmethod(lambda: None)

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        Held.hold()
        return gradient


def test_a_backward_that_ends_elsewhere_leaves_this_one_scaled() -> None:
    model, reached, go_on = body(lambda m, x: m.second(Held.apply(hidden(m, x)))), threading.Event(), threading.Event()

    def loss() -> Tensor:
        held = squared(model(X))
        Held.hold = staticmethod(lambda: (reached.set(), go_on.wait(10)))
        thread = threading.Thread(target=held.backward)
        thread.start()
        assert reached.wait(10)
        Held.hold = staticmethod(lambda: None)
        squared(model(X)).backward()
        go_on.set()
        thread.join()
        return squared(model(X))

    check_gradients(model, loss)


def test_an_argument_that_another_thread_made_is_outside() -> None:
    model, before = body(), nn.Linear(6, 6)

    def loss() -> Tensor:
        for _ in range(50):
            made = before(X)  # autograd numbers nodes by thread
        with ThreadPoolExecutor() as pool:
            return pool.submit(lambda: squared(model(made))).result()

    check_gradients(model, loss, before.parameters())


def test_a_step_in_the_middle_of_a_scaled_backward_is_refused() -> None:
    model: Any = body()
    model, optimizer = hf_mp.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp16")
    handle = model.second.weight.register_post_accumulate_grad_hook(lambda _: optimizer.step())
    with pytest.raises(RuntimeError, match=r"step\(\) was called during a backward.*free_gradients='backward'"):
        squared(model(X)).backward()
    handle.remove()
    model.zero_grad()
    take_step(squared(model(X)), optimizer)
    assert not optimizer.step_was_skipped


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
        ([2, -2, -2], 100, [[2], [2, 2]]),
    ],
)
def test_weights_share_an_unscale_node_up_to_so_many_elements(
    sizes: list[int], elements: int, expected: list[list[int]]
) -> None:
    # a size below zero stands for a weight on another device
    weights = [torch.zeros(abs(size), device="meta" if size < 0 else "cpu") for size in sizes]
    groups = list(_node_groups([(weight, None) for weight in weights], elements))
    assert [[weight.numel() for weight, _ in group] for group in groups] == expected


# Tensors from outside that no torch call of the forward is given


@every_kind
@pytest.mark.parametrize("kept", ["parameter", "leaf", "computed"])
def test_an_autograd_function_is_given_a_tensor_from_a_closure(kept: str, precision: str) -> None:
    factor, leaf = nn.Parameter(torch.ones(6)), torch.full((6,), 0.5, requires_grad=True)
    made: list[Tensor] = []
    model = body(lambda m, x: m.second(Times.apply(hidden(m, x).float(), made[-1])), factor=factor)

    def loss() -> Tensor:
        made.append({"parameter": factor, "leaf": leaf, "computed": leaf.sigmoid()}[kept])
        return squared(model(X))

    check_gradients(model, loss, () if kept == "parameter" else (leaf,), precision=precision)


@pytest.mark.parametrize("is_computed", [False, True])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_what_comes_into_a_checkpoint_from_outside(use_reentrant: bool, is_computed: bool) -> None:
    leaf, gates = torch.full((6,), 0.5, requires_grad=True), []

    def use(m: Any, x: Tensor) -> Tensor:
        gate = gates[-1]
        start = x * gate
        return m.second(checkpoint(lambda x: torch.tanh(hidden(m, x) * gate), start, use_reentrant=use_reentrant))

    model = body(use)

    def loss() -> Tensor:
        gates.append(leaf + 0.0 if is_computed else leaf)  # saves nothing: a reentrant checkpoint goes through it twice
        return squared(model(X))

    check_gradients(model, loss, [leaf])


def test_a_state_that_was_carried_on_and_not_returned_leads_outside() -> None:
    gate = torch.full((6,), 0.5, requires_grad=True)

    def use(m: Any, x: Tensor) -> Tensor:
        y = hidden(m, x if m.state is None else x + m.state)
        m.state = y * gate
        return m.second(y)

    model = body(use, state=None)

    def loss() -> Tensor:
        model.state = None
        return squared(model(X)) + squared(model(X)) + squared(model(X))

    check_gradients(model, loss, [gate])


@pytest.mark.parametrize("kept", ["leaf", "computed", "weight"])
def test_a_second_derivative_leads_to_a_tensor_from_a_closure(kept: str) -> None:
    gate = torch.full((6,), 0.5, requires_grad=True)
    made: list[Tensor] = []
    model = body(lambda m, x: m.second(torch.tanh(m.first(x) * made[-1])))

    def loss() -> Tensor:
        x = X.clone().requires_grad_()
        made.append({"leaf": gate, "computed": gate.sigmoid(), "weight": model.first.bias}[kept])
        y = model(x)
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return squared(y) + squared(slope)

    check_gradients(model, loss, () if kept == "weight" else [gate])


@pytest.mark.parametrize("of", ["weights", "input"])
def test_third_derivatives(of: str) -> None:
    model, x = body(lambda m, x: m.second(hidden(m, x))), X.clone().requires_grad_()

    def loss() -> Tensor:
        x.grad = None
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        (bend,) = torch.autograd.grad(squared(slope), x, create_graph=True)
        return squared(bend)

    def twice_by_weights() -> Tensor:
        given = [model.first.weight, model.second.weight]
        found = torch.autograd.grad(squared(model(x)) / 200, given, create_graph=True)
        return sum(map(squared, torch.autograd.grad(sum(map(squared, found)), given, create_graph=True)))  # type: ignore[return-value,arg-type]

    check_gradients(model, {"input": loss, "weights": twice_by_weights}[of], [x])


@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp16-lean", "bf16-lean"])
def test_an_update_inside_of_the_loss(precision: str) -> None:
    """MAML: ``torch.func.functional_call`` with tensors that came of a step."""
    model = body()

    def loss() -> Tensor:
        weights: Any = dict(model.named_parameters())
        for _ in range(2):
            found = squared(torch.func.functional_call(model, weights, (X,))) / 32
            steps = torch.autograd.grad(found, list(weights.values()), create_graph=True)
            weights = {key: weight - 0.5 * step for (key, weight), step in zip(weights.items(), steps, strict=True)}
        return squared(torch.func.functional_call(model, weights, (X,)))

    check_gradients(model, loss, precision=precision, tolerance=0.1)


TRANSFORMS: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]] = {
    "grad": lambda f, x: torch.func.grad(lambda y: f(y).sum())(x),
    "vjp": lambda f, x: torch.func.vjp(f, x)[1](torch.ones(16, 6))[0],
    "jacrev": lambda f, x: torch.func.jacrev(lambda y: f(y).sum(0))(x).sum(0),
    "vmap of grad": lambda f, x: torch.func.vmap(torch.func.grad(lambda y: f(y).sum()))(x),
    "hessian": lambda f, x: torch.func.vmap(torch.func.hessian(lambda y: f(y).sum()))(x).sum(-1),
}


@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp16-lean"])
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_a_transform_inside_of_a_forward(transform: str, precision: str) -> None:
    model = body(lambda m, x: m.second(TRANSFORMS[transform](functools.partial(hidden, m), x)) + m.second(x))
    expected = model(X)
    check_gradients(model, lambda: squared(model(X)), precision=precision)
    attached(model, precision)
    with torch.no_grad():
        for _ in range(2):
            assert (model(X) - expected).norm() < 0.02 * expected.norm()


def test_a_transform_that_comes_in_a_later_forward_raises() -> None:
    is_late = False

    def use(m: Any, x: Tensor) -> Tensor:
        def both(y: Tensor) -> Tensor:
            return m.second(hidden(m, y)).sum()  # type: ignore[no-any-return]

        return torch.func.grad(both)(x) if is_late else both(x)

    model = body(use)
    attached(model)
    for _ in range(2):
        squared(model(X)).backward()
    is_late = True
    with pytest.raises(RuntimeError, match="dtype"):
        model(X)


def test_a_step_after_a_backward_that_raised() -> None:
    model = body(lambda m, x: m.second(hidden(m, x)))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model, optimizer = hf_mp.prepare(model, optimizer, "fp16")
    squared(model(X)).backward()
    inside = model.first.weight.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        squared(model(X)).backward()
    inside.remove()
    optimizer.step()
    assert not optimizer.step_was_skipped


def test_an_external_tensor_of_a_later_forward_only_is_unscaled_too() -> None:
    gate, is_gated = torch.full((6,), 0.5, requires_grad=True), False
    model = body(lambda m, x: m.second(hidden(m, x) * (gate if is_gated else 1.0)))
    (expected,) = torch.autograd.grad(squared(model.second(hidden(model, X) * gate)), gate)
    runtime = attached(model)
    for is_gated in (False, False, True, True):
        squared(model(X)).backward()
        if is_gated:
            assert_true([gate.grad], [expected])
            gate.grad = None
    # Edges of second derivatives are made later, so only intercepted calls find their tensors.
    assert runtime.weights._intercepts_by_key[id(model.forward), True, True]


def test_second_derivatives_of_what_comes_in_late_are_right_from_the_next_forward_on() -> None:
    gate, is_gated = torch.full((6,), 0.5, requires_grad=True), False
    model = body(lambda m, x: m.second(torch.tanh(m.first(x) * (gate if is_gated else 1.0))))

    def gradient() -> Tensor:
        x, gate.grad = X.clone().requires_grad_(), None
        (slope,) = torch.autograd.grad(model(x).float().sum(), x, create_graph=True)
        squared(slope).backward()
        return torch.zeros(6) if gate.grad is None else gate.grad

    is_gated = True
    expected, is_gated = gradient(), False
    attached(model)
    gradient()
    is_gated = True
    assert gradient().norm() > 10 * expected.norm()
    assert_true([gradient()], [expected])


class Memory(nn.Module):
    """Keeps a state that it does not return; ``also`` comes into it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.state: Tensor | None = None
        self.also: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        before = 0.0 if self.state is None else self.state
        self.state = torch.tanh(self.second(x) + before)
        if self.also is not None:
            self.state = self.state * self.also
        return self.first(torch.tanh(x + before))  # type: ignore[no-any-return]


def check_what_comes_late(
    model: nn.Module, precision: str, early: Callable[[], Tensor], late: Callable[[], Tensor], gate: Tensor
) -> None:
    """The first forward of its kind, ``early``, meets nothing from outside; those of ``late`` meet ``gate``."""
    expected = gradients_of(model, late, [gate])
    attached(model, precision)
    early().backward()
    for _ in range(3):
        assert_true(gradients_of(model, late, [gate]), expected)


@pytest.mark.parametrize("precision", ["fp16", "fp16-lean"])
@pytest.mark.parametrize("kept", ["leaf", "computed"])
def test_what_comes_late_into_a_state_that_is_not_returned(kept: str, precision: str) -> None:
    model, gate = Memory(), torch.full((6,), 0.5, requires_grad=True)

    def late() -> Tensor:
        model.state, model.also = None, gate if kept == "leaf" else gate * 2
        model(X)
        return squared(model(X))

    expected = gradients_of(model, late, [gate])
    attached(model, precision)
    model.state = model.also = None
    squared(model(X)).backward()  # the first of its kind meets nothing from outside
    for _ in range(3):
        assert_true(gradients_of(model, late, [gate]), expected)


def test_a_state_that_is_not_returned_and_changed_outside_is_found() -> None:
    model = Memory()

    def loss(_: Tensor) -> Tensor:
        assert model.state is not None
        model.state = model.state * 0.5
        found = squared(model(X))
        model.state = None
        return found

    attached(model, scale=None)
    with pytest.raises(hf_mp.ScaleLeakError, match=r"second\.weight"):
        hf_mp.check_gradients(model, X, loss)


def test_what_comes_late_into_a_reentrant_checkpoint_keeps_the_scale() -> None:
    gate, also, x = torch.full((6,), 0.5, requires_grad=True), torch.ones(6), X.clone().requires_grad_()
    model = body(lambda m, x: m.second(checkpoint(lambda x: hidden(m, x) * also, x, use_reentrant=True)))
    (expected,) = torch.autograd.grad(squared(model.second(hidden(model, X) * gate)), gate)
    attached(model)
    squared(model(x)).backward()
    also = gate
    squared(model(x)).backward()
    assert gate.grad is not None
    assert_true([gate.grad / 1024], [expected])


@pytest.mark.parametrize("by", ["argument", "attribute"])
def test_a_gradient_with_a_graph_comes_in_again(by: str) -> None:
    given: list[Tensor] = []
    model = body(lambda m, x: m.second(hidden(m, x + (given[-1] if given else 0.0))))

    def loss() -> Tensor:
        x = X.clone().requires_grad_()
        given.clear()
        (slope,) = torch.autograd.grad(squared(model(x)), x, create_graph=True)
        if by == "attribute":
            given.append(slope)
        return squared(model(slope if by == "argument" else x))

    check_gradients(model, loss)


@pytest.mark.parametrize("in_a_thread", [False, True])
def test_what_a_checkpoint_takes_from_the_model_is_inside(in_a_thread: bool) -> None:
    """As ``(cos, sin)`` in a tuple, or what an encoder gave: recomputed in a thread of its own, as on a GPU."""

    def use(m: Any, x: Tensor) -> Tensor:
        inside = m.first(x)
        x = checkpoint(lambda x, pair: torch.tanh(m.first(x)) * pair[0], x, (inside,), use_reentrant=True)
        return m.second(x)

    model = body(use)
    x = X.clone().requires_grad_()
    expected = gradients_of(model, lambda: squared(model(x)))
    attached(model)
    for _ in range(3):
        model.zero_grad()
        with ThreadPoolExecutor(1) as pool:
            (pool.submit(squared(model(x)).backward).result() if in_a_thread else squared(model(x)).backward())
        assert_true([parameter.grad for parameter in model.parameters()], expected)


def test_a_leaf_in_a_container_comes_into_a_checkpoint() -> None:
    gate = torch.full((6,), 0.5, requires_grad=True)

    def use(m: Any, x: Tensor) -> Tensor:
        return m.second(checkpoint(lambda x, t: torch.tanh(m.first(x) * t[0]), x * 1.0, (gate,), use_reentrant=True))

    model = body(use)
    check_gradients(model, lambda: squared(model(X.clone().requires_grad_())), [gate])
