"""What is kept of a step in case it fails, and what a replay gives back: random states, inputs, modules, gradients."""

from __future__ import annotations

import contextlib
import inspect
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hf_mp.casting.nested import named_tensors, tensors_in
from hf_mp.weights.lean.split_parameter import SplitParameter, open_master

_GRAD: Any = Tensor.grad  # the property itself, which split parameters override


@dataclass(frozen=True)
class RandomStates:
    others: tuple[Any, Any] | None  # Python's and NumPy's; None if not kept
    cpu: Tensor
    cuda: list[Tensor]  # by device

    @classmethod
    def now(cls, *, torch_only: bool = False) -> RandomStates:
        """The current states, without a synchronization: a GPU generator's state is on the host."""
        has_context = torch.cuda.is_available() and torch.cuda.is_initialized()
        keeps_cuda = has_context and not torch.cuda.is_current_stream_capturing()
        # Few models use Python's and NumPy's, which are slow to copy.
        others = None if torch_only else (random.getstate(), np.random.get_state())
        return cls(others, torch.get_rng_state(), torch.cuda.get_rng_state_all() if keeps_cuda else [])

    def restore(self) -> None:
        if self.others is not None:
            random.setstate(self.others[0])
            np.random.set_state(self.others[1])
        torch.set_rng_state(self.cpu)
        torch.cuda.set_rng_state_all(self.cuda)


@dataclass
class KeptCall:
    """One call of an attached forward, before it is made."""

    forward: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    random_states: RandomStates
    losses: dict[str, Tensor] = field(default_factory=dict)  # scalar outputs by name, detached

    def __post_init__(self) -> None:
        self.is_training = self.forward.module().training
        self.versions = self.versions_now()

    def inputs(self) -> list[tuple[str, Tensor]]:
        """The input tensors, named by the forward's parameters."""
        try:
            bound = inspect.signature(self.forward.original).bind(*self.args, **self.kwargs)
        except (TypeError, ValueError):
            return named_tensors(self.args) + named_tensors(self.kwargs)
        return named_tensors(bound.arguments)

    def versions_now(self) -> tuple[int, ...]:
        return tuple(-1 if t.is_inference() else t._version for t in tensors_in((self.args, self.kwargs)))


@dataclass
class IncomingGradient:
    """A gradient that entered the model through an output in a backward; None if too large to keep."""

    call: KeptCall
    output: str
    gradient: Tensor | None
    version: int = 0


@dataclass
class KeptBackward:
    """One micro-batch: a backward through the outputs of one or more calls."""

    task: int  # autograd's ID of the backward
    incoming: list[IncomingGradient] = field(default_factory=list)  # the gradients that entered
    largest: Tensor | None = None  # the largest magnitude in the parameters' gradients, unread; None if not measured

    @property
    def calls(self) -> list[KeptCall]:
        return list({id(entry.call): entry.call for entry in reversed(self.incoming)}.values())


@contextlib.contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Restore, bit for bit, what a forward of ``model`` changes: buffers, tensors and counters of modules, their
    training mode, and the states of random generators."""
    random_states = RandomStates.now()
    modules = [(module, dict(vars(module)), dict(module._buffers)) for module in model.modules()]
    held = [(name, v) for _, attributes, buffers in modules for name, v in (*attributes.items(), *buffers.items())]
    tensors = {t: t.detach().clone() for _, t in held if isinstance(t, Tensor) and not t.is_inference()}
    containers: list[Any] = [(v, v.copy()) for name, v in held if type(v) in (list, dict) and name[0] != "_"]
    try:
        with torch.autograd._unsafe_preserve_version_counter(tuple(tensors)):
            try:
                yield
            finally:
                for module, attributes, buffers in modules:
                    for registry, entries in ((vars(module), attributes), (module._buffers, buffers)):
                        registry.clear()
                        registry.update(entries)
                with torch.no_grad():
                    for tensor, value in tensors.items():
                        tensor.copy_(value)
                for container, items in containers:
                    container.clear()
                    container.extend(items) if isinstance(container, list) else container.update(items)
    finally:
        random_states.restore()


@contextlib.contextmanager
def gradients_set_aside(parameters: list[nn.Parameter]) -> Iterator[None]:
    """Set gradients to None, and restore them at the end, scaled ones unchanged."""
    # A split parameter has gradients apart from .grad.
    names = ("_scaled", "_read")
    kept = [(_GRAD.__get__(p), {name: getattr(p, name) for name in names if hasattr(p, name)}) for p in parameters]
    for parameter in parameters:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, (gradient, others) in zip(parameters, kept, strict=True):
            _GRAD.__set__(parameter, gradient)
            parameter.__dict__.update(others)


@contextlib.contextmanager
def weights_kept(model: nn.Module) -> Iterator[None]:
    """Give parameters and buffers the memory and dtype back that they have now, into which nothing may write."""
    parameters = [(parameter, parameter.data, parameter.grad_dtype) for parameter in model.parameters()]
    buffers = [(buffer, buffer.data) for buffer in model.buffers()]
    try:
        yield
    finally:
        for buffer, data in buffers:
            buffer.data = data
        for parameter, data, grad_dtype in parameters:
            if parameter.dtype is not data.dtype:
                parameter.grad = None
            parameter.data = data
            if parameter.grad_dtype is not grad_dtype:
                # torch has no way back to "as the parameter": a dtype that is set would hold after .float(), too.
                parameter.grad_dtype = None


@contextlib.contextmanager
def masters_in_place(model: nn.Module, dtype: torch.dtype = torch.float32) -> Iterator[dict[int, nn.Parameter]]:
    """Replace split parameters by their FP32 masters, in ``dtype``; yields them by the parameters' ids."""
    masters: dict[int, nn.Parameter] = {}
    places = [(module, name, p) for module in model.modules() for name, p in module._parameters.items()]
    try:
        for module, name, parameter in places:
            if isinstance(parameter, SplitParameter):
                if id(parameter) not in masters:
                    masters[id(parameter)] = nn.Parameter(open_master(parameter).to(dtype), parameter.requires_grad)
                module._parameters[name] = masters[id(parameter)]
        yield masters
    finally:
        for module, name, parameter in places:
            module._parameters[name] = parameter


def eagerly() -> contextlib.AbstractContextManager[Any]:
    """To run a compiled model in as it was written, so that hooks see its modules."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else contextlib.nullcontext()
