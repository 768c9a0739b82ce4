import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from scale_provider import ScaleProvider
from torch import Tensor
from torch.nn import functional as F

from hf_mp.casting.deferred_output import DeferredOutput
from hf_mp.scale_boundary import cast_to_output


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        ctx.save_for_backward(value)
        return value * value

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (value,) = ctx.saved_tensors
        return 2 * value * gradient


def write_element(y: Tensor) -> Tensor:
    y[1] = 0.0
    return y.square().sum()


def write_view(y: Tensor) -> Tensor:
    y[:, 1].mul_(2.0)
    return y.square().sum()


USES: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda y: y.sum(),
    "fp64": lambda y: y.double().square().sum(),
    "in place": lambda y: y.div_(3.0).square().sum(),
    "element written": write_element,
    "view written": write_view,
    "views": lambda y: (y.view(-1)[3:9] * y.t().reshape(-1)[3:9]).sum(),
    "twice in one call": lambda y: torch.cat([y, y.float()], 1).softmax(1).square().sum(),
    "autograd function": lambda y: Square.apply(y).sum(),
    "cross entropy": lambda y: F.cross_entropy(y, torch.arange(4)),
    "detached beside": lambda y: (y.detach() * y).sum(),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_values_and_gradients_are_those_of_an_output_cast_at_once(use: Any, dtype: torch.dtype) -> None:
    results = []
    for deferred in (False, True):
        leaf = torch.randn(4, 6, generator=torch.Generator().manual_seed(0)).to(dtype).requires_grad_()
        output = cast_to_output(leaf * 1, ScaleProvider(4.0), DeferredOutput if deferred else None)
        assert isinstance(output, DeferredOutput) is deferred
        value = use(output)
        assert type(value) is Tensor
        value.backward()
        results.append((value.detach(), leaf.grad))
    (value, gradient), (expected_value, expected) = results[1], results[0]
    assert torch.equal(value, expected_value)
    assert torch.equal(gradient, expected)


def deferred_output() -> DeferredOutput:
    output = cast_to_output(torch.randn(4, 6).half().requires_grad_() * 1, ScaleProvider(4.0), DeferredOutput)
    assert isinstance(output, DeferredOutput)
    return output


def test_it_has_the_properties_of_its_fp32_value() -> None:
    output = deferred_output()
    assert (output.shape, output.dtype, output.device.type) == ((4, 6), torch.float32, "cpu")
    assert output.requires_grad and output.grad_fn is not None and not output.is_leaf
    assert output._value is None  # so far nobody has read it


def test_it_leaves_pytorch_as_an_ordinary_tensor() -> None:
    output = deferred_output()
    plain = output.detach()
    assert type(plain) is Tensor
    assert output.tolist() == plain.tolist()
    assert (output.numpy(force=True) == plain.numpy()).all()
    with pytest.raises(RuntimeError, match="requires grad"):
        output.numpy()
    assert type(pickle.loads(pickle.dumps(output))) is Tensor
    file = io.BytesIO()
    torch.save(output, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=True), plain)
    assert repr(output) == repr(plain)
    assert type(copy.deepcopy(output.detach())) is Tensor


def test_a_kernel_that_asks_for_the_memory_gets_that_of_the_values() -> None:
    output = DeferredOutput(torch.randn(4, 5).half())
    assert output.data_ptr() == output.value().data_ptr() != 0


def test_the_source_goes_when_the_values_are_there() -> None:
    output = deferred_output()
    output.sum()
    assert not hasattr(output, "_source")
