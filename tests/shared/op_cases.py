"""Calls of every op in torch's OpInfo database, and what they give: what sweeps over all ops share."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

pytest.importorskip("expecttest", reason="torch's OpInfo database needs it: pip install expecttest")

from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo

Context = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Case:
    """One call.

    Attributes:
        op: name of the op in the database.
        variant: ``"function"``, ``"method"``, ``"inplace"``, ``"out"`` or the name of an alias.
        dtype: of the sample.
        function: what to call; with ``out=`` for ``"out"``.
        args, kwargs: what with; leaves of a graph where the op has a gradient.
    """

    op: str
    variant: str
    dtype: torch.dtype
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def __str__(self) -> str:
        return f"{self.op} {self.variant} {str(self.dtype).removeprefix('torch.')}"


def tensors(value: Any) -> list[Tensor]:
    """All tensors in it."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def cases(
    *,
    samples: int | None,
    device: str = "cpu",
    dtypes: tuple[torch.dtype, ...] = (),
    variants: bool = True,
    gradients: bool = True,
    only: Callable[[OpInfo], bool] = lambda op: True,
) -> Iterator[Case]:
    """Calls of every op in the database.

    Args:
        samples: how many for each op and dtype; None for all that it has.
        device: where the samples lie; default ``"cpu"``.
        dtypes: default all that the op takes.
        variants: whether also the method, the in-place method, the aliases and ``out=``; default True.
        gradients: whether samples require grad; default True.
        only: which ops; default all.
    """
    for op in filter(only, op_db):
        for dtype in sorted(op.supported_dtypes(device) & set(dtypes or op.supported_dtypes(device)), key=str):
            with_gradient = gradients and op.supports_autograd and dtype in op.supported_backward_dtypes(device)
            for sample in itertools.islice(_samples(op, device, dtype, with_gradient), samples):
                name = op.name + (f".{op.variant_test_name}" if op.variant_test_name else "")
                for variant, function in _variants(op).items() if variants else [("function", op.op)]:
                    yield Case(name, variant, dtype, function, (sample.input, *sample.args), sample.kwargs)


def _samples(op: OpInfo, device: str, dtype: torch.dtype, with_gradient: bool) -> Iterator[Any]:
    _seed()
    try:
        # not op.sample_inputs(), which is slow: it searches the stack for the name of the test that calls it
        yield from op.sample_inputs_func(op, device, dtype, with_gradient)
    except Exception:  # the database has dtypes for which it cannot make its own samples, by device and version
        return


def _seed() -> None:
    """As ``torch.manual_seed``, which without a GPU stores a stack trace of each call, to seed one later."""
    torch.default_generator.manual_seed(0)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(0)


def _variants(op: OpInfo) -> dict[str, Callable[..., Any]]:
    found = {"function": op.op, "method": op.method_variant, "inplace": op.inplace_variant}
    found |= {alias.name: alias.op for alias in op.aliases}
    if op.supports_out:
        found["out"] = op.op
    return {name: function for name, function in found.items() if function is not None}


@dataclass(frozen=True)
class Outcome:
    """What a call gave.

    Attributes:
        error: what it raised, or "".
        results: its tensors.
        gradients: of the leaves, None for those that have none; empty without a graph.
        backward_error: what backward raised, or "".
    """

    error: str = ""
    results: tuple[Tensor, ...] = ()
    gradients: tuple[Tensor | None, ...] = ()
    backward_error: str = ""


def outcome(case: Case, context: Context) -> Outcome:
    """Make the call in a context, on copies of its operands, and go back through its graph outside of it."""
    has_graph = case.variant not in ("inplace", "out")
    args, kwargs = tree_map(lambda v: _copy(v, has_graph) if isinstance(v, Tensor) else v, (case.args, case.kwargs))
    try:
        if case.variant == "out":
            _seed()
            kwargs["out"] = tree_map(torch.zeros_like, case.function(*args, **kwargs))
        _seed()
        with context():
            results = tuple(tensors(case.function(*args, **kwargs)))
    except Exception as error:
        return Outcome(f"{type(error).__name__}: {error}")
    leaves = [t for t in tensors((args, kwargs)) if t.requires_grad and t.is_leaf]
    roots = [t for t in results if t.requires_grad]
    if not leaves or not roots:
        return Outcome("", results)
    try:
        weights = [torch.ones_like(root) for root in roots]
        return Outcome("", results, torch.autograd.grad(roots, leaves, weights, allow_unused=True))
    except Exception as error:
        return Outcome("", results, (), f"{type(error).__name__}: {error}")


def _copy(tensor: Tensor, has_graph: bool) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad and has_graph)


def difference(found: Outcome, expected: Outcome) -> str:
    """What differs, in words; "" where nothing does: refusals, dtypes, shapes, grads, and bits but for kinds of NaN."""
    for what, ours, theirs in (
        ("call", found.error, expected.error),
        ("backward", found.backward_error, expected.backward_error),
    ):
        if bool(ours) != bool(theirs):
            return f"{what}: ours {ours or 'runs'}, theirs {theirs or 'runs'}"
    for what, ours, theirs in (
        ("result", found.results, expected.results),
        ("gradient", found.gradients, expected.gradients),
    ):
        if len(ours) != len(theirs):
            return f"{len(ours)} {what}s, theirs {len(theirs)}"
        for one, other in zip(ours, theirs, strict=True):
            if words := _different(one, other):
                return f"{what}: {words}"
    return ""


def _different(ours: Tensor | None, theirs: Tensor | None) -> str:
    if ours is None or theirs is None:
        return "" if ours is theirs else f"ours {ours}, theirs {theirs}"
    for name in ("dtype", "shape", "requires_grad", "layout"):
        if getattr(ours, name) != getattr(theirs, name):
            return f"{name} {getattr(ours, name)}, theirs {getattr(theirs, name)}"
    if ours.layout is not torch.strided:
        ours, theirs = ours.to_dense(), theirs.to_dense()
    if ours.is_quantized or _same(ours, theirs):
        return ""
    gap = (ours.detach().to(torch.complex128) - theirs.detach().to(torch.complex128)).abs().max()
    return f"values differ by up to {float(gap):.3g}"


def _same(ours: Tensor, theirs: Tensor) -> bool:
    if ours.dtype.itemsize == 1 and ours.is_floating_point():  # torch compares no FP8
        ours, theirs = ours.view(torch.uint8), theirs.view(torch.uint8)
    return bool(((ours == theirs) | ((ours != ours) & (theirs != theirs))).all())
