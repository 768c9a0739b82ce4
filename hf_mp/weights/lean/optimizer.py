"""``MasterWeightOptimizer``: any optimizer over the FP32 master weights of a lean model."""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hf_mp.kernels.gradient_scan import real_values, total_norm
from hf_mp.policy import LOWER_PRECISION_DTYPES
from hf_mp.weights.attachable import check_closure
from hf_mp.weights.early_state import state_to_fp32
from hf_mp.weights.fused_adamw import replaces_step, skipping, step_split
from hf_mp.weights.lean.outside_reads import as_stored, stores_16_bits
from hf_mp.weights.lean.split_parameter import (
    SplitParameter,
    gradient_and_factor,
    master_value,
    multiply_gradients,
    raw_gradient,
    unscaled,
)

# Split masters are put together for as many parameters at once as have this many elements: 16 MiB in FP32.
_BUCKET_ELEMENTS = 2**22

# Optimizers that treat each parameter by itself, so that their step may be taken in parts.
STEPS_BY_PARAMETER = {
    "torch.optim": "Adadelta Adagrad Adam AdamW Adamax ASGD Muon NAdam RAdam RMSprop Rprop SGD SparseAdam Adafactor",
    "bitsandbytes.optim": "*",
    "transformers.optimization": "Adafactor",
}


def _of_wrapped(name: str, doc: str) -> Any:
    """An attribute that is the wrapped optimizer's."""
    read = operator.attrgetter(f"optimizer.{name}")
    return property(read, lambda self, value: setattr(self.optimizer, name, value), doc=doc)


class MasterWeightOptimizer(Optimizer):
    """FP32 masters for the parameters of a lean model, in any optimizer (Micikevicius et al. 2017, section 3.1).

    :func:`hf_mp.prepare` and ``attach_optimizer`` return it in the lean presets, around the optimizer that they are
    given. That runs on the masters, with FP32 gradients and FP32 state; the parameters are their roundings. An update
    that is smaller than half a unit in the last place of its weight adds up in the master instead of being lost::

        model, optimizer = hf_mp.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-4), "bf16-lean")
        model(**batch).loss.backward()
        optimizer.step()

    Hyperparameters stay in ``param_groups``, where LR schedulers find them; ``param_groups`` and ``state`` name the
    model's parameters. What is written into a parameter from outside wins over its master. Parameters of other models,
    and FP32 ones, are updated as they are. ``state_dict()`` is the optimizer's own, in FP32: the masters are in the
    model's.

    Args:
        optimizer: over parameters of a lean model; state that it has already is cast to FP32. Step this wrapper from
            now on, not it.

    Raises:
        TypeError: for anything but an optimizer.
        ValueError: for FP16/BF16 parameters that are in no lean model, ``layout=``, and an optimizer that calls its
            closure several times (LBFGS).
    """

    keeps_masters = True
    _step_supports_amp_scaling = False  # unlike a fused one inside: torch.amp.GradScaler is to unscale by itself
    optimizer: Optimizer

    def __init__(self, optimizer: Optimizer, *, layout: Any = None) -> None:
        if not isinstance(optimizer, Optimizer) or isinstance(optimizer, MasterWeightOptimizer):
            raise TypeError(
                f"MasterWeightOptimizer wraps a bare optimizer, once, not {optimizer!r:.200}: give it "
                "torch.optim.AdamW(model.parameters()) or the like"
            )
        check_closure(optimizer)
        bare = [p for group in optimizer.param_groups for p in group["params"] if _lacks_master(p)]
        if layout is not None or bare:
            raise ValueError(
                f"MasterWeightOptimizer(layout={layout!r}) over {len(bare)} FP16 or BF16 parameters of no lean model: "
                "masters are made for a whole model. Take the model and optimizer that hf_mp.prepare(model, optimizer, "
                "'bf16-lean') or 'fp16-lean' returns, or 'bf16' and 'fp16' for masters that are the parameters"
            )
        # Before it sees masters: torch would cast state to the 16 bits of what it belongs to.
        state_to_fp32(optimizer)
        self._wrap(optimizer)
        if hasattr(optimizer, "check_overrides"):
            optimizer.check_overrides()  # bitsandbytes knows parameters with settings of their own by identity

    def _wrap(self, optimizer: Any) -> None:
        self.optimizer, self._is_stepping = optimizer, False
        # Not Optimizer.__init__, which would make param_groups of its own: those are the wrapped one's.
        super().__setstate__({})  # hooks, and the step that calls them
        for name, value in vars(optimizer).items():
            if name.startswith("_optimizer_") and name.endswith("_hooks"):
                setattr(self, name, value)
        optimizer.is_wrapped = True  # its own step would round
        self._adopt(self._parameters())

    def __getstate__(self) -> dict[str, Any]:
        return {"optimizer": self.optimizer}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._wrap(state["optimizer"])

    def _adopt(self, parameters: list[nn.Parameter]) -> None:
        for parameter in parameters:
            if isinstance(parameter, SplitParameter):
                parameter.has_optimizer = True

    param_groups: Any = _of_wrapped("param_groups", "Those of the wrapped optimizer, over the model's parameters.")
    state: Any = _of_wrapped("state", "That of the wrapped optimizer, by the model's parameters; it is FP32.")
    defaults: Any = _of_wrapped("defaults", "Those of the wrapped optimizer.")

    def __getattr__(self, name: str) -> Any:
        """What the wrapped optimizer has besides; its methods run on the masters (``eval()`` of schedule-free)."""
        optimizer = vars(self).get("optimizer")
        if optimizer is None or name.startswith("__"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        value = getattr(optimizer, name)
        is_own_method = inspect.ismethod(value) and value.__self__ is optimizer
        return functools.partial(self._call_on_masters, value) if is_own_method and not self._is_stepping else value

    @torch.no_grad()
    def _call_on_masters(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        is_training = {"train": True, "eval": False}.get(method.__name__)
        if is_training is not None and all(group.get("train_mode") is is_training for group in self.param_groups):
            return None  # schedule-free has nothing to do, and the Trainer calls train() for each micro-batch
        masters = {parameter: self._open(parameter) for parameter in self._parameters()}
        for parameter, master in masters.items():
            if master is not parameter:
                master.grad = None if parameter.grad is None else parameter.grad.to(master.dtype)
        versions = {master: master._version for master in masters.values()}
        with self._in_place_of_parameters(masters):
            result = method(*args, **kwargs)
        self._close({p: master for p, master in masters.items() if master._version != versions[master]})
        return result

    def __repr__(self) -> str:
        return f"MasterWeightOptimizer({self.optimizer!r})"

    def master(self, parameter: nn.Parameter) -> Tensor:
        """The FP32 master weight of ``parameter``, detached, of its shape; write through the parameter."""
        return master_value(parameter) if isinstance(parameter, SplitParameter) else parameter.detach()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As the wrapped optimizer's."""
        self.optimizer.add_param_group(param_group)
        self._adopt(self.param_groups[-1]["params"])

    @stores_16_bits
    def zero_grad(self, set_to_none: bool = True) -> None:
        """As ``torch.optim.Optimizer.zero_grad``."""
        if set_to_none:
            for parameter in self._parameters():
                parameter.grad = None
        else:
            self.optimizer.zero_grad(set_to_none=False)

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Clip the global 2-norm of the gradients to ``max_norm``; ``inf`` only measures.

        As ``torch.nn.utils.clip_grad_norm_`` (``error_if_nonfinite=False``), without FP32 copies of gradients that are
        still scaled: those keep the factor, for their readers. Gives the unscaled norm before: FP32, of shape ().
        """
        return clip_grad_norm_(self._parameters(), max_norm)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the masters, and the parameters with them; returns what the wrapped optimizer's ``step`` returns.

        Gradients of a lean model are freed as they are used, unless a ``found_inf`` tells the device to skip.
        ``closure`` recomputes the loss and calls ``backward``: once, before the update; its result is returned.
        """
        loss = None if closure is None else torch.enable_grad()(closure)()
        result = self.step_on(self._parameters(), vars(self).get("found_inf"))
        return result if closure is None else loss

    @torch.no_grad()
    def step_on(self, parameters: list[nn.Parameter], found_inf: Tensor | None = None) -> Any:
        """Update these parameters alone; hooks of the step are not called, :meth:`step` does that.

        Where ``found_inf`` is not 0 the device skips, also torch's fused step of what no kernel has; gradients stay,
        for reports of an overflow.
        """
        with as_stored():
            stepped = step_split(self.optimizer, parameters, found_inf)
            left = [p for p in parameters if id(p) not in stepped and raw_gradient(p) is not None]
        result = None
        if left or not stepped:
            with contextlib.nullcontext() if found_inf is None else skipping(self.optimizer, found_inf):
                for bucket in self._buckets(left if stepped else parameters):
                    result = self._step_on(bucket, keeps_gradients=found_inf is not None)
        return result

    @stores_16_bits
    def free_gradients(self) -> None:
        """Let go of the gradients of split masters, which a step that the device may skip has left."""
        for parameter in self._parameters():
            if isinstance(parameter, SplitParameter):
                parameter.grad = None

    def _step_on(self, parameters: list[nn.Parameter], *, keeps_gradients: bool) -> Any:
        masters = {parameter: self._open(parameter) for parameter in parameters}
        with self._in_place_of_parameters(masters):
            for parameter, master in masters.items():
                if master is not parameter:
                    _hand_over_gradient(parameter, master)
                    if not keeps_gradients:
                        parameter.grad = None
            result = self._step_wrapped()
        self._close(masters)
        return result

    def _step_wrapped(self) -> Any:
        optimizer: Any = self.optimizer
        if replaces_step(vars(optimizer).get("step")):
            return optimizer.step()
        # Around the function that fires hooks: this object's own step does, once however many parts there are.
        optimizer._opt_called = True  # for LR schedulers made before
        step = type(optimizer).step
        return (step.__wrapped__ if getattr(step, "hooked", False) else step)(optimizer)

    def _open(self, parameter: nn.Parameter) -> nn.Parameter:
        """What the wrapped optimizer updates in the place of ``parameter``."""
        if isinstance(parameter, SplitParameter):
            return nn.Parameter(parameter.fp32_value(), requires_grad=parameter.requires_grad)
        return parameter

    def _close(self, masters: dict[nn.Parameter, nn.Parameter]) -> None:
        for parameter, master in masters.items():
            if isinstance(parameter, SplitParameter):
                parameter.write_fp32(master.detach())
                master.grad = None

    def _parameters(self) -> list[nn.Parameter]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def _buckets(self, parameters: list[nn.Parameter]) -> list[list[nn.Parameter]]:
        if not steps_by_parameter(self.optimizer):
            return [parameters]
        parameters = [p for p in parameters if raw_gradient(p) is not None]
        # A whole FP32 master for as few parameters at once as keeps the number of the optimizer's launches low.
        buckets: list[list[nn.Parameter]] = [[]]
        elements = 0
        for parameter in parameters:
            if elements and elements + parameter.numel() > _BUCKET_ELEMENTS:
                buckets.append([])
                elements = 0
            buckets[-1].append(parameter)
            elements += parameter.numel()
        return buckets

    @contextlib.contextmanager
    def _in_place_of_parameters(self, masters: Mapping[nn.Parameter, nn.Parameter]) -> Iterator[None]:
        """Have the wrapped optimizer see masters; parameters without one are not there."""
        # Without a gradient, so that the wrapped optimizer passes over it, in the place that its state's index counts.
        absent = nn.Parameter(torch.empty(0), requires_grad=False)
        shown = [[masters.get(parameter, absent) for parameter in group["params"]] for group in self.param_groups]
        hidden = [list(group["params"]) for group in self.param_groups]
        self._show(shown, masters)
        self._is_stepping = True
        try:
            yield
        finally:
            self._is_stepping = False
            self._show(hidden, {master: parameter for parameter, master in masters.items()})

    def _show(self, groups: list[list[nn.Parameter]], renamed: Mapping[nn.Parameter, nn.Parameter]) -> None:
        # In place: an optimizer may keep the list of its group.
        for group, parameters in zip(self.param_groups, groups, strict=True):
            group["params"][:] = parameters
        state = self.optimizer.state
        for before, after in renamed.items():
            if before is not after and before in state:
                state[after] = state.pop(before)

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's state, FP32; the masters are in the model's ``state_dict()``."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over a state that :meth:`state_dict` or the wrapped optimizer alone gave, bit for bit.

        Raises:
            ValueError: for a state with masters, and as ``torch.optim.Optimizer.load_state_dict``.
        """
        if state_dict.get("masters"):
            raise ValueError(
                f"this state holds {len(state_dict['masters'])} FP32 masters, which a lean model keeps itself: write "
                "each of state['masters'] into its parameter with copy_, and leave the key out"
            )
        # torch casts loaded state to the dtype of its parameter: to FP32, if it sees a FP32 one.
        shown = {
            one: nn.Parameter(torch.empty(0, dtype=torch.float32, device=one.device))
            if isinstance(one, SplitParameter)
            else one
            for one in self._parameters()
        }
        with self._in_place_of_parameters(shown):
            self.optimizer.load_state_dict({key: state_dict[key] for key in state_dict if key != "masters"})


def clip_grad_norm_(parameters: Sequence[nn.Parameter], max_norm: float) -> Tensor:
    """:meth:`MasterWeightOptimizer.clip_grad_norm_`, of any parameters."""
    by_factor: dict[tuple[torch.device, Tensor | None], list[Tensor]] = {}
    for parameter in parameters:
        gradient, factor = gradient_and_factor(parameter)
        if gradient is not None:
            by_factor.setdefault((gradient.device, factor), []).append(real_values(gradient))
    norms = {factor: total_norm(values) for factor, values in by_factor.items()}
    total = norm_of([norm if factor is None else norm * factor.squeeze() for (_, factor), norm in norms.items()])
    if (clip_by := clip_factor(total, max_norm)) is not None:
        multiply_gradients(parameters, clip_by)
    return total


def norm_of(norms: list[Tensor]) -> Tensor:
    """The norm of all from the norms of each, FP32 of shape (); 0 for none."""
    if not norms:
        return torch.zeros((), dtype=torch.float32, device="cpu")
    return torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]))


def clip_factor(total: Tensor, max_norm: float) -> Tensor | None:
    """What ``torch.nn.utils.clip_grad_norm_`` multiplies gradients of norm ``total`` with; None for no bound."""
    return (max_norm / (total + 1e-6)).clamp(max=1.0) if math.isfinite(max_norm) else None


def _hand_over_gradient(parameter: nn.Parameter, master: nn.Parameter) -> None:
    gradient, factor = gradient_and_factor(parameter)
    if gradient is None or (factor is None and gradient.dtype is torch.float32):
        master.grad = gradient
    else:
        master.grad = unscaled(gradient, factor, like=master)


def _lacks_master(parameter: nn.Parameter) -> bool:
    is_narrow = parameter.requires_grad and parameter.dtype in LOWER_PRECISION_DTYPES
    return is_narrow and not isinstance(parameter, SplitParameter)


def steps_by_parameter(optimizer: Optimizer) -> bool:
    """Whether ``optimizer`` is known to treat each parameter by itself."""
    kind: Any
    for kind in type(optimizer).__mro__:
        for module, names in STEPS_BY_PARAMETER.items():
            if kind.__module__.startswith(module) and (names == "*" or kind.__name__ in names.split()):
                # A subclass with a step of its own may look at all parameters together.
                return inspect.unwrap(type(optimizer).step) is inspect.unwrap(kind.step)
    return False
