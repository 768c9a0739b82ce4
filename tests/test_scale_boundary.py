"""The scale boundary: what backward multiplies, and by what."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from native_casts import in_cpp as in_cpp
from native_casts import kernels as kernels
from op_log import OpLog
from scale_provider import ScaleProvider
from tiny import Dispatched, assert_true, attached, gradients_of
from torch import Tensor, nn

from hf_mp import scale_boundary
from hf_mp.scale_boundary import cast_to_output, unscaling_aliases
from hf_mp.step.mixed_precision import MixedPrecision

SCALE = 2.0**20


def parameter_alias(parameter: Tensor, copy: Tensor | None, scale_provider: ScaleProvider) -> Tensor:
    (inside,), (rounded,) = unscaling_aliases([parameter], [copy], scale_provider)
    return inside if rounded is None else rounded


def test_a_torch_without_an_order_of_nodes_costs_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_can_order_nodes", "_warn_without_order"):
        monkeypatch.setattr(scale_boundary, name, functools.cache(getattr(scale_boundary, name).__wrapped__))
    monkeypatch.setattr(torch._C, "_FunctionBase", object)
    weight = torch.ones(3, requires_grad=True)
    with pytest.warns(UserWarning, match="this torch cannot order autograd nodes") as caught:
        for _ in range(2):
            parameter_alias(weight, weight.detach().half(), ScaleProvider()).sum().backward()
    assert len(caught) == 1 and weight.grad is not None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_an_output_leaves_in_fp32_and_its_gradient_enters_scaled_in_its_own_dtype(dtype: torch.dtype) -> None:
    x = torch.tensor([1.0, -2.0], dtype=dtype, requires_grad=True)
    y = cast_to_output(x, ScaleProvider(4.0))
    y.backward(torch.tensor([3.0, 5.0]))
    assert y.dtype is torch.float32 and y.tolist() == [1.0, -2.0]
    assert x.grad is not None and x.grad.dtype is dtype and x.grad.tolist() == [12.0, 20.0]


def test_the_gradient_is_scaled_before_it_is_rounded_to_fp16() -> None:
    tiny = 2.0**-30  # zero in FP16
    x = torch.ones(1, dtype=torch.float16, requires_grad=True)
    cast_to_output(x, ScaleProvider()).backward(torch.tensor([tiny]))
    assert x.grad is not None and x.grad.item() == tiny * SCALE


def test_a_parameter_gets_its_gradient_in_fp32_unscaled() -> None:
    parameter = nn.Parameter(torch.tensor([1.0 + 2.0**-20]))
    copy = parameter.detach().half()
    inside = parameter_alias(parameter, copy, ScaleProvider())
    assert inside.dtype is torch.float16 and inside.data_ptr() == copy.data_ptr()
    inside.backward(torch.tensor([3.0], dtype=torch.float16))
    assert parameter.grad is not None and parameter.grad.dtype is torch.float32
    assert parameter.grad.item() == 3.0 / SCALE  # not representable in FP16


def test_a_parameter_used_in_fp32_is_unscaled_once_per_use() -> None:
    parameter = nn.Parameter(torch.tensor([2.0]))
    loss = (
        parameter_alias(parameter, None, ScaleProvider(4.0)) * 3
        + parameter_alias(parameter, None, ScaleProvider(4.0)) * 5
    )
    cast_to_output(loss, ScaleProvider(4.0)).sum().backward()
    assert parameter.grad is not None and parameter.grad.item() == 8.0


def test_an_input_that_wants_a_gradient_gets_the_true_one() -> None:
    x = torch.tensor([3.0], requires_grad=True)
    cast_to_output(parameter_alias(x, None, ScaleProvider()) ** 2, ScaleProvider()).backward()
    assert x.grad is not None and x.grad.item() == 6.0


class Unscaled(ScaleProvider):
    def inverse_scale_for(self, *given: Any) -> None:  # type: ignore[override]
        return None


@pytest.mark.parametrize(
    "scale_provider", [ScaleProvider(), ScaleProvider(3.0), Unscaled()], ids=["2**20", "3", "unscaled"]
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gradients_of_one_unscale_node_are_unscaled_in_few_launches(
    dtype: torch.dtype, scale_provider: Any, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU, bit for bit what leaves one by one; a large gradient is cast and multiplied in one pass."""
    monkeypatch.setattr(scale_boundary, "_JOINED_ELEMENTS", 20)
    weights = [torch.randn(shape) for shape in [(3, 4), (5,), (30,), (2, 2), (7,)]]
    given = [torch.randn(one.shape).to(dtype) for one in weights] + [torch.randn(one.shape) for one in weights[3:]]

    def leave(takes: bool) -> tuple[list[Any], list[str]]:
        monkeypatch.setattr(scale_boundary, "supports_foreach", lambda tensor: takes)
        outside = [nn.Parameter(weight.clone()) for weight in weights]
        inside, rounded = unscaling_aliases(outside, [one.detach().to(dtype) for one in outside], scale_provider)
        with OpLog() as log:  # some are used as copies alone, two in FP32 as well
            torch.autograd.backward([*rounded, *inside[3:]], [one.clone() for one in given])  # type: ignore[list-item]
        return [one.grad for one in outside], [op.removeprefix("aten.").partition(".")[0] for op in log.ops]

    (ours, ops), (expected, _) = leave(True), leave(False)
    assert all(map(torch.equal, ours, expected)) and all(one.dtype is torch.float32 for one in ours)
    is_scaled = not isinstance(scale_provider, Unscaled)
    assert ops.count("_foreach_copy_") == 1
    assert ops.count("_foreach_mul_") == ops.count("_foreach_mul") == is_scaled
    assert ops.count("mul") == 2 * is_scaled  # one makes 1/S
    assert "_to_copy" not in ops and ops.count("addcmul_" if is_scaled else "add") == 2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_what_two_uses_leave_is_summed_in_fp32_without_a_second_fp32_tensor(dtype: torch.dtype) -> None:
    """A tied embedding's gradients: bit for bit each times 1/S, then the sum."""
    least = torch.finfo(dtype).smallest_normal
    special = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan"), least / 4, -least, 1.0, 65504.0])
    by_copy, by_alias = special.repeat(9), special.repeat_interleave(9)
    by_alias[by_alias.abs() == least] = 2e-39  # a subnormal FP32 number
    scale_provider, outside = ScaleProvider(2.0**20), nn.Parameter(torch.ones(81))
    (alias,), (rounded,) = unscaling_aliases([outside], [outside.detach().to(dtype)], scale_provider)
    with OpLog() as log:
        torch.autograd.backward([alias, rounded], [by_alias, by_copy.to(dtype)])
    expected = by_alias * 2.0**-20 + by_copy.to(dtype).float() * 2.0**-20
    assert torch.equal(outside.grad.view(torch.int32), expected.view(torch.int32))  # type: ignore[union-attr]
    products = [op for op in log.ops if "mul" in op]
    assert products == ["aten.mul.Tensor", "aten.mul.Tensor", "aten.addcmul_.default"]  # the first makes 1/S


def test_an_output_may_be_changed_in_place_and_used_inside_too() -> None:
    x = torch.tensor([3.0], requires_grad=True)
    inside = parameter_alias(x, None, ScaleProvider(8.0))
    logits = inside * 2
    loss = (logits**2).sum()
    out_logits, out_loss = cast_to_output(logits, ScaleProvider(8.0)), cast_to_output(loss, ScaleProvider(8.0))
    out_loss *= 10  # as the Trainer does
    (out_loss + out_logits.sum()).backward()
    assert x.grad is not None and x.grad.item() == 10 * 8 * 3 + 2
    assert logits.item() == 6.0


def test_integers_and_fp64_keep_their_dtype_and_fp64_gradients_are_scaled() -> None:
    assert cast_to_output(torch.tensor([1]), ScaleProvider()).dtype is torch.int64
    x = torch.tensor([1.0], dtype=torch.float64, requires_grad=True)
    y = cast_to_output(x, ScaleProvider(4.0))
    y.backward(torch.ones(1, dtype=torch.float64))
    assert y.dtype is torch.float64 and x.grad is not None and x.grad.item() == 4.0


def test_nothing_is_recorded_without_grad() -> None:
    parameter = nn.Parameter(torch.ones(1))
    with torch.no_grad():
        assert not parameter_alias(parameter, None, ScaleProvider()).requires_grad
        assert not cast_to_output(parameter.half(), ScaleProvider()).requires_grad


def test_the_scale_at_the_time_of_backward_counts() -> None:
    x, factor = torch.ones(1, requires_grad=True), ScaleProvider(2.0)
    y = cast_to_output(x, factor)
    factor.value.fill_(8.0)
    y.backward()
    assert x.grad is not None and x.grad.item() == 8.0 and factor.entering == [8.0]


@torch.jit.script
def scripted_product(x: Tensor, weight: Tensor) -> Tensor:
    return torch.tanh(x * weight)


class Scripted(nn.Module):
    def __init__(self, part: nn.Module | None = None) -> None:
        super().__init__()
        self.linear, self.weight, self.part = nn.Linear(4, 4), nn.Parameter(torch.randn(4)), part

    def forward(self, x: Tensor) -> Tensor:
        y = scripted_product(self.linear(x).float(), weight=self.weight)
        return (y if self.part is None else self.part(y)).float().sum()


@pytest.mark.parametrize(
    ("precision", "part", "compiles"),
    [("fp16", None, False), ("fp16", None, True), ("bf16", torch.jit.script(nn.Linear(4, 4)), False)],
    ids=["a function", "compiled", "a module where nothing is scaled"],
)
def test_a_parameter_in_what_is_scripted_gets_its_true_gradient(
    precision: str, part: nn.Module | None, compiles: bool
) -> None:
    model, x = Scripted(part), torch.randn(2, 4)
    expected = gradients_of(model, lambda: model(x))
    attached(model, precision, 1024.0 if part is None else None)
    called = torch.compile(model, backend="eager") if compiles else model
    assert_true(gradients_of(model, lambda: called(x)), expected, 0.1)


@pytest.mark.parametrize("compile_part", [torch.jit.script, lambda part: torch.jit.trace(part, torch.ones(2, 4))])
def test_a_scripted_module_is_refused_where_the_loss_is_scaled(compile_part: Callable[..., nn.Module]) -> None:
    model = Scripted(compile_part(nn.Linear(4, 4)))
    with pytest.raises(ValueError, match=r"part is a TorchScript module.*torch.compile is supported.*bf16"):
        MixedPrecision("fp16").attach(model)
    for parameter in model.part.parameters():
        parameter.requires_grad_(False)
    MixedPrecision("fp16").attach(model)


def test_a_lean_model_has_frozen_parts_in_torch_script_alone() -> None:
    model, x = Scripted(torch.jit.script(nn.Linear(4, 4))), torch.randn(2, 4)
    with pytest.raises(ValueError, match=r"part is a TorchScript module.*saves split parameters in FP32.*'bf16'"):
        MixedPrecision("bf16-lean").attach(model)
    for parameter in model.part.parameters():
        parameter.requires_grad_(False)
    expected = gradients_of(model, lambda: model(x))
    attached(model, "bf16-lean", None)
    assert_true(gradients_of(model, lambda: model(x)), expected, 0.1)


def test_gradients_leave_as_soon_as_they_are_complete() -> None:
    weights = [torch.randn(4, 4, requires_grad=True) for _ in range(3)]
    insides = [unscaling_aliases([weight], [None], ScaleProvider())[0][0] for weight in weights]
    x = torch.randn(2, 4)
    arrived: list[str] = []
    for number, weight in enumerate(weights):
        weight.register_post_accumulate_grad_hook(lambda _, number=number: arrived.append(f"gradient {number}"))
    for number, inside in enumerate(insides):
        x = x @ inside
        x.register_hook(lambda _, number=number: arrived.append(f"backward {number}"))
    x.sum().backward()
    assert arrived == ["backward 2", "gradient 2", "backward 1", "gradient 1", "backward 0", "gradient 0"]


@pytest.mark.parametrize("factor", [None, 2.0**-16])
def test_several_gradients_are_multiplied_as_one_is(factor: float | None) -> None:
    special = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0, 6e-8, 65504.0, -1.5])
    dtypes = (torch.float16, torch.float32, torch.bfloat16)
    gradients = [special.to(dtype) for dtype in dtypes] + [torch.randn(3, 5).to(dtype).t() for dtype in dtypes]
    gradients += [torch.empty(0, 4), torch.empty(0, dtype=torch.float16)]
    before = [gradient.clone() for gradient in gradients]
    number = None if factor is None else torch.tensor([factor])
    with torch.no_grad():
        with Dispatched("_foreach_mul") as products:
            found = scale_boundary._scale_gradients(gradients, number, ScaleProvider())
        assert len(products.calls) == (factor is not None)
        expected = [scale_boundary.scale_gradient(gradient, number, ScaleProvider()) for gradient in gradients]
    for one, other in zip(found, expected, strict=True):
        assert one.dtype is other.dtype
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(one.signbit(), other.signbit())
    for gradient, kept in zip(gradients, before, strict=True):  # autograd may have handed it to somebody else
        torch.testing.assert_close(gradient, kept, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("factor", [None, 2.0**-16, 3.0])
def test_gradients_that_are_scaled_in_cpp_have_the_bits_of_python(
    factor: float | None, in_cpp: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scale_boundary, "supports_foreach", lambda tensor: True)
    monkeypatch.setattr(scale_boundary, "_JOINED_ELEMENTS", 16)
    special = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0, 6e-8, 65504.0, -1.5, 2e-39])
    gradients = []
    for dtype in (torch.float16, torch.float32, torch.bfloat16, torch.float64):
        gradients += [special.to(dtype), torch.randn(3, 5).to(dtype).t(), torch.randn(17).to(dtype)]
        gradients += [torch.empty(0, 4, dtype=dtype), torch.randn(2, 1).to(dtype).expand(2, 3)]
    number = None if factor is None else torch.tensor([factor])
    with torch.no_grad():
        found = scale_boundary._scale_gradients(gradients, number, ScaleProvider())
        monkeypatch.setattr(scale_boundary, "native", lambda: None)
        expected = scale_boundary._scale_gradients(gradients, number, ScaleProvider())
    for one, other in zip(found, expected, strict=True):
        assert one.dtype is other.dtype and one.stride() == other.stride()
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(one.signbit(), other.signbit())


def test_sparse_and_scalar_gradients_and_fp64_keep_layout_shape_and_dtype(
    kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scale_boundary, "supports_foreach", lambda tensor: kernels == "c++")
    sparse = torch.sparse_coo_tensor([[1]], [3.0], (4,))
    given = [sparse, torch.tensor(3.0), torch.ones(2, dtype=torch.float64)]
    with torch.no_grad():
        found = scale_boundary._scale_gradients(given, torch.tensor([0.5]), ScaleProvider())
    assert found[0].is_sparse and found[0].to_dense().tolist() == [0.0, 1.5, 0.0, 0.0]
    assert found[1].shape == () and found[1].item() == 1.5
    assert found[2].dtype is torch.float64 and found[2].tolist() == [0.5, 0.5]
