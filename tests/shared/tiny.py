"""Small models, short trainings and what is asked of them, for all folders of tests."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

import hf_mp
from hf_mp.casting.autocast_stack import state
from hf_mp.weights.split_parameter import make_split


class Using(nn.Module):
    """A model whose forward is ``use(model, *inputs)``; modules, parameters and settings are given by name."""

    def __init__(self, use: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
        self.use = use

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.use(self, *args, **kwargs)


def linear(inputs: int = 8, outputs: int = 8, **settings: Any) -> nn.Linear:
    """The same weights each time."""
    torch.manual_seed(0)
    return nn.Linear(inputs, outputs, **settings)


def copies(tensors: Iterable[Tensor | None]) -> list[Tensor]:
    return [tensor.detach().clone() for tensor in tensors if tensor is not None]


def weights(model: nn.Module) -> list[Tensor]:
    return copies(model.parameters())


def same(left: Iterable[Tensor], right: Iterable[Tensor]) -> bool:
    """Bit for bit."""
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def same_by_name(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    """Bit for bit."""
    return left.keys() == right.keys() and same(left.values(), [right[name] for name in left])


def take_step(loss: Tensor, optimizer: Any, clip: float | None = None) -> float:
    """One step of a loop; what the loss was."""
    loss.backward()
    if clip is not None:
        nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], clip)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def attached(
    model: nn.Module, precision: str = "fp16", scale: float | None = 1024.0, **settings: Any
) -> hf_mp.MixedPrecision:
    """What is attached to ``model``, at a loss scale that stays and that a wrong gradient would show, or its own."""
    scaler = None if scale is None else hf_mp.StaticLossScaler(scale)
    runtime = hf_mp.MixedPrecision(precision, loss_scaler=scaler, **settings)
    runtime.attach(model)
    return runtime


def masters_around(optimizer: torch.optim.Optimizer, layout: str) -> hf_mp.MasterWeightOptimizer:
    """Masters of whole FP32 tensors, or, where ``layout`` is ``"split"``, as a lean layout has them."""
    for parameter in [p for group in optimizer.param_groups for p in group["params"]] if layout == "split" else ():
        if parameter.dtype in (torch.float16, torch.bfloat16):
            make_split(parameter, parameter.dtype)
    return hf_mp.MasterWeightOptimizer(optimizer)


def gradients_of(model: nn.Module, loss: Callable[[], Tensor], others: Iterable[Tensor] = ()) -> list[Tensor | None]:
    """Of all parameters of ``model`` and of ``others``, of one backward."""
    leaves = [*model.parameters(), *others]
    for leaf in leaves:
        leaf.grad = None
    loss().backward()
    return [None if leaf.grad is None else leaf.grad.clone() for leaf in leaves]


def assert_true(
    found: Iterable[Tensor | None], expected: Iterable[Tensor | None], tolerance: float = 0.05, least: float = 1e-6
) -> None:
    """Gradients of the same tensors, each within ``tolerance`` of its norm."""
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            assert (one.float() - other).norm() <= tolerance * other.norm() + least, (one, other)


def check_gradients(
    model: nn.Module, loss: Callable[[], Tensor], others: Iterable[Tensor] = (), precision: str = "fp16",
    tolerance: float = 0.05, between: float = 0.0, **settings: Any,
) -> None:  # fmt: skip
    """Those of ``loss`` are those of FP32 once ``model`` is attached; ``between`` its first forward and the second."""
    others = list(others)
    expected = gradients_of(model, loss, others)
    runtime = attached(model, precision, **settings)
    first, second = (gradients_of(model, loss, others) for _ in range(2))
    assert_true(first, expected, tolerance)
    assert_true(second, first, between, least=0.0)
    runtime.detach()


@contextmanager
def saved_tensors() -> Iterator[list[Tensor]]:
    """What autograd saves inside of this context."""
    tensors: list[Tensor] = []
    with saved_tensors_hooks(lambda tensor: tensors.append(tensor) or tensor, lambda tensor: tensor):
        yield tensors


def unscale_node(weight: Tensor) -> Any:
    """The autograd node of the tensor by which ops of the running forward read ``weight`` of a module."""
    copy = state.forward.weights.slots.working_copy(weight)  # type: ignore[union-attr]
    return (weight if copy is None else copy).grad_fn


class Dispatched(TorchDispatchMode):
    """The positional arguments of the calls that reach the kernels of ops with these names, where ``only`` says so."""

    def __init__(self, *names: str, only: Callable[[Any], bool] = lambda args: True) -> None:
        super().__init__()
        self.names, self.only, self.calls = names, only, list[tuple[str, Any]]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (name := func.overloadpacket.__name__) in self.names and self.only(args):
            self.calls.append((name, args))
        return func(*args, **(kwargs or {}))
