"""Autograd functions of a person's own under autocast, after the examples of torch's AMP documentation."""

import collections
import types
from argparse import Namespace
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from autograd_functions import Times
from tiny import Using, assert_true, attached, check_gradients, gradients_of
from torch import Tensor, nn

from hf_mp import autocast, custom_bwd, custom_fwd

FP16, BF16, FP32, FP64 = torch.float16, torch.bfloat16, torch.float32, torch.float64

seen: dict[str, torch.dtype] = {}


@pytest.fixture(autouse=True)
def _nothing_seen() -> None:
    seen.clear()


class MyMM(torch.autograd.Function):
    """torch's example "Functions with multiple inputs or autocastable ops"."""

    @staticmethod
    @custom_fwd
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        seen["forward"] = a.mm(b).dtype
        return a.mm(b)

    @staticmethod
    @custom_bwd
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        a, b = ctx.saved_tensors
        seen["backward"] = gradient.mm(b.t()).dtype
        return gradient.mm(b.t()), a.t().mm(gradient)


class MyFloat32(torch.autograd.Function):
    """torch's example "Functions that need a particular dtype"."""

    @staticmethod
    @custom_fwd(cast_inputs=torch.float32)
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        seen["x"], seen["weight"], seen["forward"] = x.dtype, weight.dtype, (x @ weight).dtype
        return x @ weight

    @staticmethod
    @custom_bwd
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        seen["backward"] = (gradient @ weight.t()).dtype
        return gradient @ weight.t(), x.t() @ gradient


class NewStyle(Times):
    """With a ``setup_context`` of its own."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor) -> Tensor:
        return x * weight

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)


@torch._dynamo.allow_in_graph
class InGraph(Times):
    """Compiled code calls it as it is."""


@pytest.mark.parametrize("dtype", [FP16, BF16], ids=str)
def test_forward_and_backward_run_in_the_autocast_of_forward(dtype: torch.dtype) -> None:
    a, b = torch.randn(3, 4, requires_grad=True), torch.randn(4, 5, requires_grad=True)
    with autocast(dtype):
        MyMM.apply(a, b).float().sum().backward()
    assert seen == {"forward": dtype, "backward": dtype}
    seen.clear()
    with autocast(dtype):
        result = MyMM.apply(a, b)
    result.float().sum().backward()
    assert seen == {"forward": dtype, "backward": dtype}


def test_outside_of_autocast_nothing_is_lowered() -> None:
    a, b = torch.randn(3, 4, requires_grad=True), torch.randn(4, 5, requires_grad=True)
    result = MyMM.apply(a, b)
    with autocast():
        result.sum().backward()
    assert seen["forward"] is FP32
    MyFloat32.apply(a.double(), b.double())
    assert seen["x"] is FP64


def test_cast_inputs_casts_and_switches_autocast_off() -> None:
    x, weight = torch.randn(3, 4, dtype=FP16, requires_grad=True), torch.randn(4, 5, requires_grad=True)
    with autocast():
        result = MyFloat32.apply(x, weight)
        assert (result @ weight.t()).dtype is FP16  # autocast is on again
    assert result.dtype is FP32
    result.sum().backward()
    assert seen == {"x": FP32, "weight": FP32, "forward": FP32, "backward": FP32}
    assert x.grad.dtype is FP16 and weight.grad.dtype is FP32


Pair = collections.namedtuple("Pair", "a b")
NESTED: dict[str, Callable[[Tensor], Any]] = {
    "after a number": lambda x: (3, x),
    "dict": lambda x: ({"a": x, "b": [x, {"c": (x, 1)}], "ids": torch.arange(2), "wide": x.double()},),
    "OrderedDict": lambda x: (collections.OrderedDict(a=x),),
    "UserDict": lambda x: (collections.UserDict(a=x),),
    "list": lambda x: ([1, x, (x, None)],),
    "set": lambda x: ({x},),
    "deque": lambda x: (collections.deque([x]),),
    "generator": lambda x: ((one for one in (x, {"a": x})),),
    "values": lambda x: ({"a": x}.values(),),
    "without tensors": lambda x: ({"a": 1, "b": "text"}, "text", b"text", torch.Size((2,)), np.ones(2)),
}


def dtypes_in(value: Any) -> list[torch.dtype]:
    """In the order in which they come, of all that torch's cast_inputs looks into."""
    if isinstance(value, Tensor):
        return [value.dtype]
    items = value.values() if isinstance(value, collections.abc.Mapping) else value
    is_leaf = isinstance(items, (str, bytes, np.ndarray)) or not isinstance(items, collections.abc.Iterable)
    return [] if is_leaf else [dtype for item in items for dtype in dtypes_in(item)]


@pytest.mark.parametrize("place", NESTED)
def test_cast_inputs_casts_the_tensors_that_torchs_does(place: str) -> None:
    def given(ctx: Any, *args: Any, **kwargs: Any) -> Any:
        return args, kwargs

    x = torch.ones(2, dtype=BF16)
    with autocast(BF16):
        args, kwargs = custom_fwd(given, cast_inputs=FP32)(Namespace(), *NESTED[place](x), keyword=NESTED[place](x))
    theirs = torch.amp.custom_fwd(given, device_type="cpu", cast_inputs=FP32)
    with torch.autocast("cpu", BF16):
        expected = theirs(Namespace(), *NESTED[place](x), keyword=NESTED[place](x))
    kinds = [type(one) for one in args]
    assert kinds == [type(one) for one in NESTED[place](x)] or kinds == [types.GeneratorType]  # torch: a dict of each
    assert dtypes_in((args, kwargs)) == dtypes_in(expected)


def test_what_cast_inputs_leaves_as_it_is() -> None:
    x, state = torch.ones(2, dtype=FP16), {"seen": [torch.ones(2)], "steps": 1}
    with autocast():
        pair, found = custom_fwd(lambda ctx, *args: args, cast_inputs=FP32)(Namespace(), Pair(x, x.double()), state)
    assert found is state  # nothing in it changes, and somebody may write to it
    assert type(pair) is Pair and (pair.a.dtype, pair.b.dtype) == (FP32, FP64)


@pytest.mark.parametrize("is_compiled", [False, True])
def test_a_module_in_fp32_is_given_what_a_dictionary_holds_in_fp32(is_compiled: bool) -> None:
    torch._dynamo.reset()
    own = Using(lambda m, given: given["hidden"][0] * 1.0)
    model = Using(lambda m, x: m.own({"hidden": [m.linear(x)]}), linear=nn.Linear(4, 4), own=own)
    run = torch.compile(model, backend="eager", fullgraph=True) if is_compiled else model
    with autocast(rules={"own": "fp32"}, model=model):
        assert run(torch.randn(3, 4)).dtype is FP32


@pytest.mark.parametrize("cast_inputs", ["fp32", 32, True])
def test_a_dtype_that_is_none(cast_inputs: Any) -> None:
    with pytest.raises(TypeError, match=rf"cast_inputs must be a torch.dtype, not {cast_inputs!r}"):
        custom_fwd(cast_inputs=cast_inputs)


def applying(function: Any, shape: tuple[int, ...]) -> Using:
    return Using(
        lambda m, x: function.apply(m.linear(x), m.weight).float().square().mean(),
        linear=nn.Linear(4, 4),
        weight=nn.Parameter(torch.randn(shape)),
    )


@pytest.mark.parametrize(
    ("function", "shape"), [(MyMM, (4, 5)), (MyFloat32, (4, 5)), (Times, (4,))], ids=["mm", "float32", "plain"]
)
@pytest.mark.parametrize("scale", [1.0, 2.0**12])
def test_a_bare_parameter_in_an_attached_model_gets_its_true_gradient(
    function: Callable[..., Any], shape: tuple[int, ...], scale: float
) -> None:
    model, x = applying(function, shape), torch.randn(3, 4)
    check_gradients(model, lambda: model(x), tolerance=0.01, scale=scale)


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp16-lean"])
def test_cast_inputs_casts_the_weight_of_a_layer(precision: str) -> None:
    model = Using(lambda m, x: MyFloat32.apply(m.linear(x), m.linear.weight).square().mean(), linear=nn.Linear(4, 4))
    x = torch.randn(3, 4)
    check_gradients(model, lambda: model(x), precision=precision, between=0.05)


def test_a_module_in_fp32_is_given_the_weight_of_a_layer_in_fp32() -> None:
    given: list[Tensor] = []

    class Own(nn.Module):
        def forward(self, x: Tensor, weight: Tensor) -> Tensor:
            given.append(weight)
            return Times.apply(x, weight.sum(0))  # type: ignore[no-any-return]

    model = Using(lambda m, x: m.own(m.linear(x), m.linear.weight).sum(), linear=nn.Linear(4, 4), own=Own())
    attached(model, "bf16", None, rules={"own": "fp32"})
    model(torch.randn(3, 4)).backward()
    with torch._C.DisableTorchFunction():
        assert given[0].dtype is FP32


CALLS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "apply": lambda x, weight: Times.apply(x, weight),
    "alias": (lambda apply: lambda x, weight: apply(x, weight))(Times.apply),
    "keyword": lambda x, weight: Times.apply(x, weight=weight),
    "setup_context": lambda x, weight: NewStyle.apply(x, weight),
    "allow_in_graph": lambda x, weight: InGraph.apply(x, weight),
}


@pytest.mark.parametrize("backend", ["none", "eager", "aot_eager"])
@pytest.mark.parametrize("call", CALLS)
def test_a_bare_parameter_in_a_compiled_model_gets_its_true_gradient_too(call: str, backend: str) -> None:
    if call == "keyword" and not TAKES_KEYWORDS:
        pytest.skip("this torch's apply takes no keywords")
    torch._dynamo.reset()
    weight, x = nn.Parameter(torch.randn(4)), torch.randn(2, 4)
    model = Using(lambda m, x: CALLS[call](m.linear(x), m.weight).sum(), linear=nn.Linear(4, 4), weight=weight)
    run = model if backend == "none" else torch.compile(model, backend=backend)
    expected = gradients_of(model, lambda: model(x))
    attached(model)
    for _ in range(2):
        assert_true(gradients_of(model, lambda: run(x)), expected, 0.01)


def _takes_keywords() -> bool:
    try:
        Times.apply(torch.ones(1), weight=torch.ones(1))
    except TypeError:
        return False
    return True


TAKES_KEYWORDS = _takes_keywords()


def test_no_graph_breaks_for_an_unscale_node() -> None:
    torch._dynamo.reset()
    weight, outside = nn.Parameter(torch.ones(4)), torch.full((4,), 3.0, requires_grad=True)

    model = Using(lambda m, x: (Times.apply(x, m.weight) + Times.apply(x, outside)).sum(), weight=weight)
    model.forward = torch.compile(model.forward, fullgraph=True, backend="eager")
    attached(model)
    model(torch.ones(2, 4)).backward()
    assert torch.equal(weight.grad, torch.full((4,), 2.0)) and torch.equal(outside.grad, torch.full((4,), 2.0))


def test_a_function_outside_of_the_model_is_left_alone() -> None:
    model, weight = nn.Linear(4, 4), nn.Parameter(torch.ones(4))
    attached(model, scale=4096.0)
    Times.apply(model(torch.randn(2, 4)).detach() * 0 + 1, weight).sum().backward()
    assert torch.equal(weight.grad, torch.full((4,), 2.0))
