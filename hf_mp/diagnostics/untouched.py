"""Run a model once more and leave no trace of it: buffers, attributes, gradients and random states stay as they are."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from hf_mp.diagnostics.kept_calls import RandomStates
from hf_mp.weights.split_parameter import SplitParameter, open_master

_GRAD: Any = Tensor.grad  # the property itself, which split parameters override


@contextlib.contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Restore, bit for bit, what a forward of ``model`` changes: buffers, tensors and counters of modules, their
    training mode, and the states of random generators."""
    random_states = RandomStates.now()
    modules = [_ModuleState(module) for module in model.modules()]
    tensors = list({id(tensor): tensor for state in modules for tensor, _ in state.tensors}.values())
    try:
        with torch.autograd._unsafe_preserve_version_counter(tuple(tensors)):
            try:
                yield
            finally:
                for state in modules:
                    state.restore()
    finally:
        random_states.restore()


class _ModuleState:
    """What a module holds besides parameters and submodules."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._attributes = dict(module.__dict__)
        self._buffers = dict(module._buffers)
        found = [*self._buffers.values(), *self._attributes.values()]
        self.tensors = [(t, t.detach().clone()) for t in found if isinstance(t, Tensor) and not t.is_inference()]
        containers = (v for name, v in self._attributes.items() if type(v) in (list, dict) and name[0] != "_")
        self._containers: list[tuple[Any, Any]] = [(value, value.copy()) for value in containers]

    @torch.no_grad()
    def restore(self) -> None:
        attributes = self._module.__dict__
        for name in attributes.keys() - self._attributes.keys():
            del attributes[name]
        attributes.update(self._attributes)
        self._module._buffers.clear()
        self._module._buffers.update(self._buffers)
        for tensor, value in self.tensors:
            tensor.copy_(value)
        for container, items in self._containers:
            container.clear()
            container.extend(items) if isinstance(container, list) else container.update(items)


@contextlib.contextmanager
def gradients_set_aside(parameters: list[nn.Parameter]) -> Iterator[None]:
    """Begin with no gradients, and put those that are there back at the end, still scaled ones as they are."""
    kept = [(_GRAD.__get__(parameter), _beside_grad(parameter)) for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, (gradient, beside) in zip(parameters, kept, strict=True):
            _GRAD.__set__(parameter, gradient)
            parameter.__dict__.update(beside)


def _beside_grad(parameter: nn.Parameter) -> dict[str, Any]:
    """What a split parameter knows of its gradient besides ``.grad``."""
    return {name: parameter.__dict__[name] for name in ("_scaled", "_read") if name in parameter.__dict__}


@contextlib.contextmanager
def masters_in_place(model: nn.Module) -> Iterator[dict[int, nn.Parameter]]:
    """Have modules hold FP32 masters in the places of split parameters; gives them by the identity of the latter."""
    masters: dict[int, nn.Parameter] = {}
    places = [(module, name, p) for module in model.modules() for name, p in module._parameters.items()]
    try:
        for module, name, parameter in places:
            if isinstance(parameter, SplitParameter):
                if id(parameter) not in masters:
                    masters[id(parameter)] = nn.Parameter(open_master(parameter), parameter.requires_grad)
                module._parameters[name] = masters[id(parameter)]
        yield masters
    finally:
        for module, name, parameter in places:
            module._parameters[name] = parameter
