"""Records a step for reruns, and restores a model."""

from __future__ import annotations

import contextlib
import inspect
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from hf_mp.diagnostics.values import finiteness
from hf_mp.kernels.nested import named_tensors
from hf_mp.weights.split_parameter import SplitParameter

_Result = TypeVar("_Result")
_GRAD: Any = Tensor.grad  # the property, which split parameters override


def save_rng_states() -> Callable[[], None]:
    """Save all RNG states; return a function that restores them. Does not synchronize."""
    python, numpy, cpu, cuda = random.getstate(), np.random.get_state(), torch.get_rng_state(), list[Tensor]()
    # torch cannot read it while a graph is captured.
    if torch.cuda.is_available() and torch.cuda.is_initialized() and not torch.cuda.is_current_stream_capturing():
        cuda = torch.cuda.get_rng_state_all()

    def restore() -> None:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(cpu)
        torch.cuda.set_rng_state_all(cuda)

    return restore


@dataclass(eq=False)
class RecordedCall:
    """One call of an attached forward, recorded before it runs."""

    forward: Any  # AttachedForward
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    is_training: bool
    restore_rng_states: Callable[[], None]
    losses: dict[str, Tensor] = field(default_factory=dict)  # scalar outputs by name, detached

    def run_recorded(self, make: Callable[..., Any]) -> dict[str, Tensor]:
        """Call ``make(call, args, kwargs)`` with the recorded RNG states; return the outputs by name."""
        module = self.forward.module()
        if module.training != self.is_training:  # train() also sets submodules
            module.train(self.is_training)
        self.restore_rng_states()
        return dict(named_tensors(make(self, self.args, self.kwargs)))


@dataclass
class IncomingGradient:
    """Gradient of one model output in a backward; None if it was too large to store."""

    call: RecordedCall
    output: str
    gradient: Tensor | None


@dataclass
class RecordedBackward:
    """One micro-batch: a backward through the outputs of one or more calls."""

    task: int  # autograd's ID of the backward
    incoming: list[IncomingGradient] = field(default_factory=list)
    largest: Tensor | None = None  # magnitude in the parameters' gradients, FP32 of shape (); None if not measured

    @property
    def calls(self) -> list[RecordedCall]:
        return list(dict.fromkeys(entry.call for entry in reversed(self.incoming)))

    def inputs(self) -> list[tuple[str, Tensor]]:
        bound = [inspect.signature(call.forward.original).bind(*call.args, **call.kwargs) for call in self.calls]
        return [named for one in bound for named in named_tensors(one.arguments)]

    def has_all_gradients(self) -> bool:
        return all(entry.gradient is not None for entry in self.incoming)

    def has_nonfinite_gradient(self) -> bool:
        return any(entry.gradient is not None and bool(finiteness(entry.gradient)) for entry in self.incoming)

    def has_nonfinite_loss(self) -> bool:
        """Whether a loss or its gradient is inf or NaN: the loss scale is not the cause."""
        losses = [loss for call in self.calls for loss in call.losses.values()]
        return self.has_nonfinite_gradient() or any(map(finiteness, losses))

    def run_recorded(self, make: Callable[..., Any]) -> list[Tensor]:
        """Run all calls; return the outputs of ``incoming``."""
        outputs = {call: call.run_recorded(make) for call in self.calls}
        return [outputs[entry.call][entry.output] for entry in self.incoming]


@contextlib.contextmanager
def restoring_module_state(model: nn.Module) -> Iterator[None]:
    """Restore, bit for bit, buffers, attributes of modules and RNG states, which a forward may change."""
    restore_rng_states = save_rng_states()
    tensors, containers = _copy_module_state(model)
    # A graph that has saved these tensors would raise for another version.
    with torch.autograd._unsafe_preserve_version_counter(tuple(tensors)):
        try:
            yield
        finally:
            restore_rng_states()
            with torch.no_grad():
                for tensor, value in tensors.items():
                    tensor.copy_(value)
            for container, items in containers:
                container.clear()
                container.extend(items) if isinstance(container, list) else container.update(items)


def _copy_module_state(model: nn.Module) -> tuple[dict[Tensor, Tensor], list[tuple[Any, Any]]]:
    namespaces = [namespace for module in model.modules() for namespace in (vars(module), module._buffers)]
    attributes: list[tuple[str, Any]] = [item for namespace in namespaces for item in namespace.items()]
    tensors = {t: t.detach().clone() for _, t in attributes if isinstance(t, Tensor) and not t.is_inference()}
    # The containers of nn.Module itself have private names.
    containers = [value for name, value in attributes if name[0] != "_" and type(value) in (list, dict)]
    return tensors, [(container, container.copy()) for container in (*namespaces, *containers)]


@contextlib.contextmanager
def without_gradients(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Set gradients to None; restore them on exit, scaled ones as they are."""
    with contextlib.ExitStack() as restored:
        for parameter in parameters:
            if isinstance(parameter, SplitParameter):
                restored.callback(vars(parameter).__setitem__, "_scaled_gradient", parameter._scaled_gradient)
            restored.callback(_GRAD.__set__, parameter, _GRAD.__get__(parameter))
            parameter.grad = None
        yield


@contextlib.contextmanager
def restoring_weights(model: nn.Module) -> Iterator[None]:
    """Restore the memory, which code inside must not write to, and dtype of parameters and buffers."""
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
                # torch cannot reset it to its default, the parameter's dtype.
                parameter.grad_dtype = None


def run_with_masters(model: nn.Module, dtype: torch.dtype, run: Callable[[], _Result]) -> _Result:
    """Return ``run()``, with split parameters replaced by masters in ``dtype``."""
    masters: dict[str, Tensor] = {
        f"model.{name}": nn.Parameter(parameter.fp32_value().to(dtype), parameter.requires_grad)
        for name, parameter in model.named_parameters()
        if isinstance(parameter, SplitParameter)
    }
    # functional_call replaces parameters of the module it calls.
    holder: Any = nn.ModuleDict({"model": model})
    holder.forward = run
    return functional_call(holder, masters, ())


def compile_disabled() -> contextlib.AbstractContextManager[Any]:
    """Run compiled models eagerly, so that hooks of their modules run."""
    # Importing the compiler takes a second.
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else contextlib.nullcontext()
