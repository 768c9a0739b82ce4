"""Transient copies: made at each use, never saved for backward."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from tiny import saved_tensors
from torch import Tensor, nn

import hf_mp
from hf_mp.scale_boundary import unscaling_aliases
from hf_mp.weights.sharded_layouts import UncachedCopies
from hf_mp.weights.working_copies import WorkingCopies

USES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "linear": F.linear,
    "transposed": lambda x, w: x @ w.t(),
    "rows": lambda x, w: x * w[1:3, 0].sum() + (x @ w[:, :4])[..., :1],
    "twice": lambda x, w: (x @ w) @ w,
}


def inside(weight: nn.Parameter, copy: Tensor) -> Tensor:
    """A use of ``copy`` in the place of ``weight``."""
    runtime = hf_mp.MixedPrecision("bf16")
    (_,), (rounded,) = unscaling_aliases([weight], [copy], runtime.scale_provider)
    assert rounded is not None
    return rounded


def gradients(
    use: Callable[[Tensor, Tensor], Tensor], copies: UncachedCopies | None, weight: nn.Parameter, x: Tensor
) -> tuple[Tensor, Tensor]:
    x = x.detach().requires_grad_()
    if copies is None:
        use(x, inside(weight, weight.detach().to(torch.bfloat16))).float().sum().backward()
    else:
        copy = copies.get(weight)
        memory = weakref.ref(copy.untyped_storage())
        rounded = inside(weight, copy)
        del copy  # a forward holds an alias of it
        with copies.recompute_copies():
            y = use(x, rounded)
        del rounded
        assert memory() is None, "autograd holds the copy"
        y.float().sum().backward()
    assert weight.grad is not None and x.grad is not None
    found, weight.grad = weight.grad, None
    return found, x.grad


@pytest.mark.parametrize("use", USES.values(), ids=USES.keys())
def test_gradients_are_those_with_saved_copies(use: Callable[[Tensor, Tensor], Tensor]) -> None:
    weight, x = nn.Parameter(torch.randn(8, 8)), torch.randn(3, 8).bfloat16()
    for left, right in zip(
        gradients(use, UncachedCopies(torch.bfloat16), weight, x), gradients(use, None, weight, x), strict=True
    ):
        assert torch.equal(left, right)


def test_backward_reads_the_parameter_as_it_is_then() -> None:
    # As FSDP does: memory freed after forward, filled again before backward, no version counter raised.
    weight, copies = nn.Parameter(torch.randn(8, 8)), UncachedCopies(torch.bfloat16)
    x = torch.randn(3, 8, dtype=torch.bfloat16, requires_grad=True)
    value, bytes_ = weight.detach().clone(), weight.nbytes
    with copies.recompute_copies():
        y = F.linear(x, inside(weight, copies.get(weight)))
    weight.untyped_storage().resize_(0)
    weight.untyped_storage().resize_(bytes_)
    with torch.autograd._unsafe_preserve_version_counter(weight), torch.no_grad():
        weight.copy_(value)
    y.backward(torch.ones_like(y))
    assert x.grad is not None
    assert torch.equal(x.grad, torch.ones_like(y) @ value.bfloat16())


def test_a_tensor_changed_in_place_before_backward_is_still_an_error() -> None:
    x = torch.randn(3, requires_grad=True)
    with UncachedCopies(torch.float16).recompute_copies():
        y = x.exp()
        z = y * y
    y.detach().add_(1)
    with pytest.raises(RuntimeError, match=r"changed by an in-place operation: a torch.float32 tensor of shape \[3\]"):
        z.sum().backward()


def test_hooks_of_others_stay_in_force() -> None:
    weight, copies = nn.Parameter(torch.randn(8, 8)), UncachedCopies(torch.float16)
    x = torch.randn(3, 8, dtype=torch.float32, requires_grad=True)
    with saved_tensors() as seen, copies.recompute_copies():
        y = x * inside(weight, copies.get(weight))[:3]
    assert torch.float16 in {tensor.dtype for tensor in seen}
    y.sum().backward()


def test_a_graph_that_is_never_run_backward_leaves_nothing() -> None:
    weight, copies = nn.Parameter(torch.randn(8, 8)), UncachedCopies(torch.float16)
    gc.disable()  # a cycle would wait for it
    try:
        with copies.recompute_copies():
            y = torch.softmax((torch.randn(3, 8) * inside(weight, copies.get(weight))[:3]).exp(), 0)
        alive = weakref.ref(y)
        del y
        assert alive() is None
    finally:
        gc.enable()


def test_a_parameter_in_a_shared_buffer_is_never_read_stale() -> None:
    buffer = torch.ones(4)
    weight, copies = nn.Parameter(torch.as_strided(buffer, (2, 2), (2, 1))), WorkingCopies(torch.float16)
    copies.get(weight)
    with torch.autograd._unsafe_preserve_version_counter(buffer):
        buffer.fill_(2.0)
    assert copies.get(weight).eq(2.0).all()
