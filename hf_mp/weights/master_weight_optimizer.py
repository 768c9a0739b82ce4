"""``MasterWeightOptimizer``: FP32 master weights for any optimizer over FP16/BF16 parameters."""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hf_mp._warnings import warn_caller
from hf_mp.casting.data_tracking import track_data_writes, version_and_address
from hf_mp.dtypes import LOWER_PRECISION_DTYPES
from hf_mp.kernels.gradient_scan import norm_of, real_values, tensor_norm, total_norm
from hf_mp.kernels.split import split
from hf_mp.kernels.tensors import is_on_host
from hf_mp.model_index import optimizer_parameters
from hf_mp.weights.attach_checks import check_closure
from hf_mp.weights.fp32_reads import as_stored, on_stored_values
from hf_mp.weights.fused_adamw import UpdateCache, clip_factor, fused_step_split, replaces_step, with_found_inf
from hf_mp.weights.optimizer_state import optimizers_in, state_to_fp32
from hf_mp.weights.split_parameter import (
    SplitParameter,
    gradient_and_factor,
    has_gradient,
    master_value,
    multiply_gradients,
    unscaled,
)

_BUCKET_ELEMENTS = 2**22  # of split parameters that are merged into FP32 masters at once: 16 MiB
_STEP_BY_PARAMETER = ("torch.optim", "bitsandbytes.optim", "transformers.optimization")  # except LBFGS, which raises


def _of_wrapped(name: str, doc: str) -> Any:
    inner = operator.attrgetter(f"optimizer.{name}")
    return property(inner, lambda self, value: setattr(self.optimizer, name, value), doc=doc)


class MasterWeightOptimizer(Optimizer):
    """FP32 masters for the FP16/BF16 parameters of any optimizer (Micikevicius et al. 2017, section 3.1).

    The optimizer updates the masters, with FP32 gradients and state; the parameters are rounded from them. Updates
    smaller than half a unit in the last place of a weight add up instead of being lost::

        optimizer = hf_mp.MasterWeightOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-4))
        loss.backward()
        optimizer.step()

    ``param_groups`` and ``state`` are those of the wrapped optimizer, with the model's parameters. A value that you
    write into a parameter becomes its master. FP32 parameters are updated directly. With loss scaling in the explicit
    style, ``scaler.unscale_`` and ``scaler.step`` cast gradients to FP32.

    A master is an FP32 tensor; in a lean layout, the parameter with 16 more bits (:mod:`hf_mp.kernels.split`).

    Args:
        optimizer: an optimizer over floating parameters; its state is cast to FP32. Step the wrapper instead.

    Raises:
        TypeError: for parameters that are not floating, and for anything but an optimizer; when copied or pickled.
        ValueError: for an optimizer that calls its closure several times (LBFGS).
    """

    keeps_masters = True  # FP16 gradients may be unscaled: they become FP32
    skips_on_device = True  # whether found_inf may skip a step without waiting on the host
    _step_supports_amp_scaling = False  # torch.amp.GradScaler unscales, also if the wrapped optimizer is fused
    optimizer: Optimizer

    def __init__(self, optimizer: Optimizer) -> None:
        _check_wrappable(optimizer)
        state_to_fp32(optimizer)
        self.optimizer = optimizer
        # FP32 masters of parameters that are not split, with version_and_address() of the parameter; None after a load.
        self._masters: dict[nn.Parameter, tuple[Tensor, tuple[int, int, int] | None]] = {}
        self._updates = UpdateCache()
        super().__setstate__({})  # makes the hooks; Optimizer.__init__ would make new param_groups
        for name, value in vars(optimizer).items():
            if name.endswith("_hooks"):
                setattr(self, name, value)
        optimizer.register_step_pre_hook(self._check_step_of_wrapper)
        if hasattr(optimizer, "check_overrides"):
            optimizer.check_overrides()  # bitsandbytes finds per-parameter settings by identity
        self._mark_split(optimizer_parameters(optimizer))
        _warn_of_hidden_parameters(optimizer)
        if not any(map(_needs_master, optimizer_parameters(self))):
            warn_caller("MasterWeightOptimizer has nothing to do: no parameter is FP16 or BF16")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "a MasterWeightOptimizer is not copied or pickled: wrap another optimizer, and load state_dict()"
        )

    def _check_step_of_wrapper(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Pre-step hook: raise a RuntimeError if the wrapped optimizer is stepped instead of the wrapper."""
        # In a step of the wrapper and after detach(), all parameters are FP32.
        if optimizer is self.optimizer and any(map(_needs_master, optimizer_parameters(self))):
            raise RuntimeError(
                f"this {type(optimizer).__name__} was stepped itself, but its masters are in a MasterWeightOptimizer: "
                "call step() of the optimizer that prepare(...) or MasterWeightOptimizer(...) returned"
            )

    _check_step_of_wrapper.is_internal = True  # type: ignore[attr-defined]

    def _mark_split(self, parameters: list[nn.Parameter]) -> None:
        for parameter in parameters:
            if not (parameter.is_floating_point() or parameter.is_complex()):
                raise TypeError(
                    f"master weights are for floating parameters, not for one of {parameter.dtype} and shape "
                    f"{tuple(parameter.shape)}: leave it out of the optimizer"
                )
            if isinstance(parameter, SplitParameter):
                parameter.has_optimizer = True

    param_groups: Any = _of_wrapped("param_groups", "Groups of the wrapped optimizer, with the model's parameters.")
    state: Any = _of_wrapped("state", "State of the wrapped optimizer, FP32, by the model's parameters.")
    defaults: Any = _of_wrapped("defaults", "Defaults of the wrapped optimizer.")

    def __getattr__(self, name: str) -> Any:
        """Attributes of the wrapped optimizer; methods are called with FP32 masters."""
        optimizer = vars(self).get("optimizer")
        if optimizer is None or name.startswith("__"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        value = getattr(optimizer, name)
        if getattr(value, "__self__", None) is not optimizer:
            return value
        # Split parameters need no swap.
        needs_swap = any(_needs_master(p) and not isinstance(p, SplitParameter) for p in optimizer_parameters(self))
        return functools.partial(self._call_on_masters, value) if needs_swap else value

    @torch.no_grad()
    def _call_on_masters(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a method that may write parameters (``eval()`` of schedule-free optimizers)."""
        with self._masters_swapped_in(optimizer_parameters(self)):
            return method(*args, **kwargs)

    def master(self, parameter: nn.Parameter) -> Tensor:
        """Return the detached FP32 master weight of ``parameter``; write through the parameter."""
        if isinstance(parameter, SplitParameter):
            return master_value(parameter)
        return self._stored_master(parameter) if _needs_master(parameter) else parameter.detach()

    @torch.no_grad()
    def _stored_master(self, parameter: nn.Parameter) -> Tensor:
        """Return the FP32 master of a 16-bit parameter that is not split."""
        if parameter not in self._masters:
            track_data_writes(parameter)
            self._masters[parameter] = parameter.float(), version_and_address(parameter)
        master, when_written = self._masters[parameter]
        now = version_and_address(parameter)
        if when_written != now:
            master = _where_rounded(master.to(parameter.device), parameter.detach(), parameter.float())
            self._masters[parameter] = master, now
        return master

    def refresh(self) -> None:
        """Update the masters with undetectable writes to FP16/BF16 parameters, before the next step overwrites them.

        Needed only after a write through NumPy, DLPack, a storage or C++ code.
        """
        self._masters.update({parameter: (master, None) for parameter, (master, _) in self._masters.items()})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As ``torch.optim.Optimizer.add_param_group``; FP16/BF16 parameters get masters as well."""
        self.optimizer.add_param_group(param_group)
        self._mark_split(self.param_groups[-1]["params"])

    @on_stored_values
    def zero_grad(self, set_to_none: bool = True) -> None:
        """As ``torch.optim.Optimizer.zero_grad``."""
        if set_to_none:
            for parameter in optimizer_parameters(self):
                parameter.grad = None
        else:
            self.optimizer.zero_grad(set_to_none=False)

    @on_stored_values
    def release_gradients(self) -> None:
        """Free gradients of a lean layout after a step with ``found_inf``."""
        for parameter in optimizer_parameters(self):
            if isinstance(parameter, SplitParameter):
                parameter.grad = None

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Clip the global 2-norm of the gradients to ``max_norm``; ``inf`` only measures.

        As ``torch.nn.utils.clip_grad_norm_`` (``error_if_nonfinite=False``), without FP32 copies of scaled gradients.
        Returns the unscaled norm before clipping, FP32 of shape ().
        """
        return clip_grad_norm_(optimizer_parameters(self), max_norm)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the masters and the parameters; return the result of ``closure``.

        In a lean layout, gradients are freed unless ``found_inf`` is set. ``closure`` recomputes the loss and calls
        ``backward`` once, before the update.
        """
        loss = None if closure is None else torch.enable_grad()(closure)()
        self.step_on(optimizer_parameters(self), vars(self).get("found_inf"))
        return loss

    @torch.no_grad()
    def step_on(self, parameters: list[nn.Parameter], found_inf: Tensor | None = None) -> None:
        """Update only these parameters, without the hooks of a step.

        If ``found_inf`` is not 0, the device skips the update. With ``found_inf``, no gradient is freed.
        """
        with as_stored():
            stepped = fused_step_split(self.optimizer, parameters, self._updates, found_inf)
            left = [p for p in parameters if id(p) not in stepped and has_gradient(p)] if stepped else parameters
        if stepped and not left:
            return
        with contextlib.nullcontext() if found_inf is None else with_found_inf(self.optimizer, found_inf):
            for bucket in self._buckets(left):
                self._step_on(bucket, keeps_gradients=found_inf is not None)

    def _step_on(self, parameters: list[nn.Parameter], *, keeps_gradients: bool) -> None:
        with self._masters_swapped_in(parameters) as masters:
            for parameter, master in masters.items():
                if master is not parameter:
                    gradient, factor = gradient_and_factor(parameter)
                    if gradient is not None and gradient.dtype is not torch.float32:
                        gradient = unscaled(gradient, factor, like=master)
                    master.grad = gradient
                    if isinstance(parameter, SplitParameter) and not keeps_gradients:
                        parameter.grad = None
            self._step_wrapped()

    def _step_wrapped(self) -> None:
        """Call the wrapped optimizer's step without hooks."""
        optimizer: Any = self.optimizer
        if replaces_step(vars(optimizer).get("step")):
            optimizer.step()
            return
        optimizer._opt_called = True  # read by LR schedulers
        step = type(optimizer).step
        if getattr(step, "hooked", False):
            step = step.__wrapped__
        step(optimizer)

    def _master_of(self, parameter: nn.Parameter) -> nn.Parameter:
        if not _needs_master(parameter):
            return parameter
        value = parameter.fp32_value() if isinstance(parameter, SplitParameter) else self._stored_master(parameter)
        return nn.Parameter(value, requires_grad=parameter.requires_grad)  # the type that torch's fast paths require

    @contextlib.contextmanager
    def _masters_swapped_in(self, parameters: Sequence[nn.Parameter]) -> Iterator[dict[nn.Parameter, nn.Parameter]]:
        """Context in which the wrapped optimizer has only the masters of ``parameters``, which are stored at exit."""
        masters = {parameter: self._master_of(parameter) for parameter in parameters}
        with self._in_place_of_parameters(masters):
            yield masters
        for parameter, master in masters.items():
            if isinstance(parameter, SplitParameter):
                parameter.write_fp32(master.detach())
            elif master is not parameter:
                parameter.copy_(master)
                self._masters[parameter] = master.detach(), version_and_address(parameter)

    def _buckets(self, parameters: list[nn.Parameter]) -> list[list[nn.Parameter]]:
        """Divide ``parameters`` into parts to merge and step one at a time."""
        if not steps_by_parameter(self.optimizer):
            return [parameters]
        buckets: list[list[nn.Parameter]] = [[]]
        elements = 0
        for parameter in filter(has_gradient, parameters):
            added = parameter.numel() if isinstance(parameter, SplitParameter) else 0  # other masters are stored
            if elements and elements + added > _BUCKET_ELEMENTS:
                buckets.append([])
                elements = 0
            buckets[-1].append(parameter)
            elements += added
        return buckets

    @contextlib.contextmanager
    def _in_place_of_parameters(self, masters: Mapping[nn.Parameter, nn.Parameter]) -> Iterator[None]:
        """Context in which the wrapped optimizer has ``masters`` instead of their parameters, and no others."""
        # Replaces others, so that indices stay. Optimizers skip it, because it has no gradient.
        absent = nn.Parameter(torch.empty(0), requires_grad=False)
        before = [list(group["params"]) for group in self.param_groups]
        self._set_groups([[masters.get(parameter, absent) for parameter in group] for group in before], masters)
        try:
            yield
        finally:
            self._set_groups(before, {master: parameter for parameter, master in masters.items()})

    def _set_groups(self, groups: list[list[nn.Parameter]], new_keys: Mapping[nn.Parameter, nn.Parameter]) -> None:
        for group, parameters in zip(self.param_groups, groups, strict=True):
            group["params"][:] = parameters  # in place: an optimizer may reference the list
        for optimizer in optimizers_in(self.optimizer):
            for state in [one for one in (optimizer.state, *vars(optimizer).values()) if isinstance(one, dict)]:
                for key in [key for key in state if isinstance(key, nn.Parameter)]:
                    new_key = new_keys.get(key, key)
                    if new_key is not key:
                        state[new_key] = state.pop(key)

    def _device_of_state(self, parameter: nn.Parameter) -> torch.device:
        """Device for loaded state."""
        return parameter.device

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped optimizer's state, and under ``masters`` the FP32 masters that no model saves.

        ``masters`` maps the index of a parameter (as in ``state``) to an FP32 tensor of its shape. A lean model saves
        its own masters. Other optimizers can load the state, without masters.
        """
        saved = {index: self.master(p) for index, p in enumerate(optimizer_parameters(self)) if p in self._masters}
        return {**self.optimizer.state_dict(), "masters": saved}

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the result of :meth:`state_dict`, bit for bit.

        The model's weights may be loaded before or after, in a lean layout before: a loaded master is used if the
        parameter is its rounding. Without ``masters``, masters are made of the parameters.

        Raises:
            ValueError: for masters of another shape or dtype, and as ``torch.optim.Optimizer.load_state_dict``.
        """
        parameters = optimizer_parameters(self)
        given: Mapping[int, Tensor] = state_dict.get("masters", {})
        _check_masters(given, parameters)
        # torch casts loaded state to the dtype of the parameter.
        in_fp32 = lambda p: nn.Parameter(torch.empty(0, dtype=torch.float32, device=self._device_of_state(p)))  # noqa: E731
        with self._in_place_of_parameters({p: in_fp32(p) if _needs_master(p) else p for p in parameters}):
            self.optimizer.load_state_dict({key: state_dict[key] for key in state_dict if key != "masters"})
        self._masters.clear()
        for index, tensor in given.items():
            parameter, master = parameters[index], tensor.detach().clone()
            if isinstance(parameter, SplitParameter):
                master, own = master.to(parameter.device), self.master(parameter).to(parameter.device)
                parameter.write_fp32(_where_rounded(master, parameter.read_halves().working, own))
            elif _needs_master(parameter):
                track_data_writes(parameter)
                self._masters[parameter] = master, None


@on_stored_values
def clip_grad_norm_(parameters: Sequence[nn.Parameter], max_norm: float) -> Tensor:
    """As :meth:`MasterWeightOptimizer.clip_grad_norm_`, of any parameters."""
    norms: list[tuple[Tensor, Tensor | None]] = []  # scaled norms, unscale factors
    on_device: dict[tuple[torch.device, Tensor | None], list[Tensor]] = {}  # gradients by device and unscale factor
    for parameter in parameters:
        gradient, factor = gradient_and_factor(parameter)
        if gradient is None:
            continue
        values = real_values(gradient)
        if is_on_host(values):  # in this order, so that an optimizer step in backward has the same sum
            norms.append((tensor_norm(values), factor))
        else:
            on_device.setdefault((values.device, factor), []).append(values)
    norms += [(total_norm(values), factor) for (_, factor), values in on_device.items()]
    total = norm_of([norm if factor is None else norm * factor.squeeze() for norm, factor in norms])
    if math.isfinite(max_norm):
        multiply_gradients(parameters, clip_factor(total, max_norm))
    return total


def _check_wrappable(optimizer: Any) -> None:
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"MasterWeightOptimizer wraps an optimizer, not {optimizer!r}: give it "
            "torch.optim.AdamW(model.parameters()) or the like"
        )
    if isinstance(optimizer, MasterWeightOptimizer):
        raise TypeError("this optimizer is a MasterWeightOptimizer already: wrap one only once")
    check_closure(optimizer)


def _warn_of_hidden_parameters(optimizer: Optimizer) -> None:
    groups = [group["params"] for group in optimizer.param_groups]
    for name, value in vars(optimizer).items():
        is_other_list = isinstance(value, (list, tuple)) and all(value is not group for group in groups)
        if is_other_list and any(isinstance(one, nn.Parameter) and _needs_master(one) for one in value):
            warn_caller(
                f"{type(optimizer).__name__}.{name} lists 16-bit parameters, and updates made through it are lost: "
                "during a step, only param_groups has the FP32 masters and their gradients. Have the optimizer read "
                "param_groups, or use 'fp16' or 'bf16'"
            )


def _check_masters(given: Any, parameters: Sequence[nn.Parameter]) -> None:
    if not isinstance(given, Mapping):
        raise ValueError(f"masters is a {type(given).__name__}, not a mapping by the numbers of parameters")
    for index, tensor in given.items():
        shape = tuple(parameters[index].shape) if index in range(len(parameters)) else None
        found = (tuple(tensor.shape), tensor.dtype) if isinstance(tensor, Tensor) else (type(tensor), None)
        if found != (shape, torch.float32):
            raise ValueError(
                f"masters[{index!r}] is {found[1]} of shape {found[0]}, but the parameter of that number here has an "
                f"FP32 master of shape {shape}: load the state of this model's own optimizer"
            )


def _where_rounded(master: Tensor, working: Tensor, otherwise: Tensor) -> Tensor:
    """Return ``master`` where ``working`` is its rounding, by torch or by a split, and ``otherwise`` elsewhere."""
    is_rounding = (master.to(working.dtype) == working) | (split(master, working.dtype).working == working)
    return torch.where(is_rounding, master, otherwise)


def _needs_master(parameter: Tensor) -> bool:
    return parameter.dtype in LOWER_PRECISION_DTYPES


def steps_by_parameter(optimizer: Optimizer) -> bool:
    """Whether ``optimizer`` updates each parameter separately."""
    # A subclass that overrides step() may combine them. torch's Optimizer is always found.
    base: Any = next(kind for kind in type(optimizer).__mro__ if kind.__module__.startswith(_STEP_BY_PARAMETER))
    return inspect.unwrap(type(optimizer).step) is inspect.unwrap(base.step)
