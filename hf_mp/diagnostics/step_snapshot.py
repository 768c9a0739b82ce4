"""What is kept of a step in case it fails, and what a replay gives back: random states, inputs, modules, gradients."""

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
_GRAD: Any = Tensor.grad  # the property itself, which split parameters override


def save_rng_states() -> Callable[[], None]:
    """Keep the states of all random generators, without a synchronization; returns what restores them."""
    python, numpy, cpu, cuda = random.getstate(), np.random.get_state(), torch.get_rng_state(), list[Tensor]()
    # While a graph is captured, torch refuses to read the state. A GPU generator's is on the host.
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
    """One call of an attached forward, before it is made."""

    forward: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    is_training: bool
    restore_rng_states: Callable[[], None]
    losses: dict[str, Tensor] = field(default_factory=dict)  # scalar outputs by name, detached

    def run_recorded(self, make: Callable[..., Any]) -> dict[str, Tensor]:
        """The outputs by name of what ``make`` gives for the call, with the random numbers that it had."""
        module = self.forward.module()
        if module.training != self.is_training:  # else a part in another mode stays in it
            module.train(self.is_training)
        self.restore_rng_states()
        return dict(named_tensors(make(self, self.args, self.kwargs)))


@dataclass
class IncomingGradient:
    """A gradient that entered the model through an output in a backward; None if too large to keep."""

    call: RecordedCall
    output: str
    gradient: Tensor | None


@dataclass
class RecordedBackward:
    """One micro-batch: a backward through the outputs of one or more calls."""

    task: int  # autograd's ID of the backward
    incoming: list[IncomingGradient] = field(default_factory=list)  # the gradients that entered
    largest: Tensor | None = None  # the largest magnitude in the parameters' gradients, unread; None if not measured

    @property
    def calls(self) -> list[RecordedCall]:
        return list(dict.fromkeys(entry.call for entry in reversed(self.incoming)))

    def inputs(self) -> list[tuple[str, Tensor]]:
        """The input tensors of all calls, named by the forward's parameters."""
        bound = [inspect.signature(call.forward.original).bind(*call.args, **call.kwargs) for call in self.calls]
        return [named for one in bound for named in named_tensors(one.arguments)]

    def has_all_gradients(self) -> bool:
        """Whether all gradients that entered are here."""
        return all(entry.gradient is not None for entry in self.incoming)

    def has_nonfinite_gradient(self) -> bool:
        """Whether a gradient that entered is not finite."""
        return any(entry.gradient is not None and bool(finiteness(entry.gradient)) for entry in self.incoming)

    def has_nonfinite_loss(self) -> bool:
        """Whether a loss or its gradient is not finite: then the scale is not the cause."""
        return self.has_nonfinite_gradient() or any(
            finiteness(loss) for call in self.calls for loss in call.losses.values()
        )

    def run_recorded(self, make: Callable[..., Any]) -> list[Tensor]:
        """The outputs that the gradients came in through, of calls made again by ``make(call, args, kwargs)``."""
        outputs = {call: call.run_recorded(make) for call in self.calls}
        return [outputs[entry.call][entry.output] for entry in self.incoming]


@contextlib.contextmanager
def restoring_module_state(model: nn.Module) -> Iterator[None]:
    """Restore, bit for bit, what a forward of ``model`` changes: buffers, tensors and counters of modules, their
    training mode, and the states of random generators."""
    restore_rng_states = save_rng_states()
    tensors, containers = _held_by(model)
    # Restored values are those that the graph of the training has saved; a new version would make its backward raise.
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


def _held_by(model: nn.Module) -> tuple[dict[Tensor, Tensor], list[tuple[Any, Any]]]:
    """Tensors, and lists and dictionaries, that modules hold, each with a copy of what it holds now."""
    registries = [found for module in model.modules() for found in (vars(module), module._buffers)]
    held: list[tuple[str, Any]] = [(name, value) for registry in registries for name, value in registry.items()]
    own = [value for name, value in held if name[0] != "_" and type(value) in (list, dict)]  # the others are torch's
    tensors = {t: t.detach().clone() for _, t in held if isinstance(t, Tensor) and not t.is_inference()}
    return tensors, [(container, container.copy()) for container in (*registries, *own)]


@contextlib.contextmanager
def without_gradients(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Set gradients to None, and restore them at the end, scaled ones unchanged."""
    with contextlib.ExitStack() as restored:
        for parameter in parameters:
            # A split parameter keeps one beside .grad.
            others = {"_kept": parameter._kept} if isinstance(parameter, SplitParameter) else {}
            restored.callback(vars(parameter).update, others)
            restored.callback(_GRAD.__set__, parameter, _GRAD.__get__(parameter))
            parameter.grad = None
        yield


@contextlib.contextmanager
def restoring_weights(model: nn.Module) -> Iterator[None]:
    """Give parameters and buffers the memory and dtype back that they have now, into which nothing may write."""
    # Aliases, not copies: what writes makes memory of its own, so this costs no second model.
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


def run_with_masters(model: nn.Module, dtype: torch.dtype, run: Callable[[], _Result]) -> _Result:
    """What ``run`` gives while split parameters of ``model``, tied ones too, are their FP32 masters in ``dtype``."""
    masters: dict[str, Tensor] = {
        f"model.{name}": nn.Parameter(parameter.fp32_value().to(dtype), parameter.requires_grad)
        for name, parameter in model.named_parameters()
        if isinstance(parameter, SplitParameter)
    }
    holder: Any = nn.ModuleDict({"model": model})  # whose call is what runs with other parameters in the model
    holder.forward = run
    return functional_call(holder, masters, ())


def compile_disabled() -> contextlib.AbstractContextManager[Any]:
    """To run a compiled model in as it was written, so that hooks see its modules."""
    # Only where the compiler is loaded: its import takes a second.
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else contextlib.nullcontext()
