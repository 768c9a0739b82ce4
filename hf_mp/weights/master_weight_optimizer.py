"""``MasterWeightOptimizer``: FP32 master weights around any optimizer over FP16/BF16 parameters."""

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
from hf_mp.casting.watched import track_data_writes, version_and_address
from hf_mp.dtypes import LOWER_PRECISION_DTYPES
from hf_mp.kernels.gradient_scan import norm_of, real_values, tensor_norm, total_norm
from hf_mp.kernels.split import split
from hf_mp.kernels.tensors import is_on_host
from hf_mp.model_walk import optimizer_parameters
from hf_mp.weights.attachable import check_closure
from hf_mp.weights.early_state import optimizers_in, state_to_fp32
from hf_mp.weights.fused_adamw import UpdateCache, clip_factor, fused_step_split, replaces_step, with_found_inf
from hf_mp.weights.outside_reads import as_stored, on_stored_values
from hf_mp.weights.split_parameter import (
    SplitParameter,
    gradient_and_factor,
    has_gradient,
    master_value,
    multiply_gradients,
    unscaled,
)

# Split masters are put together for as many parameters at once as have this many elements: 16 MiB in FP32.
_BUCKET_ELEMENTS = 2**22

# Packages whose optimizers treat each parameter by itself, so that their step may be taken in parts (LBFGS, which needs
# a closure, is refused before).
_STEP_BY_PARAMETER = ("torch.optim", "bitsandbytes.optim", "transformers.optimization")


def _of_wrapped(name: str, doc: str) -> Any:
    """An attribute that is the wrapped optimizer's."""
    inner = operator.attrgetter(f"optimizer.{name}")
    return property(inner, lambda self, value: setattr(self.optimizer, name, value), doc=doc)


class MasterWeightOptimizer(Optimizer):
    """FP32 masters for the FP16/BF16 parameters of any optimizer (Micikevicius et al. 2017, section 3.1).

    The optimizer runs on the masters, with FP32 gradients and FP32 state; the parameters are their roundings. An update
    that is smaller than half a unit in the last place of its weight adds up in the master instead of being lost::

        optimizer = hf_mp.MasterWeightOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-4))
        loss.backward()
        optimizer.step()

    Hyperparameters stay in ``param_groups``, where LR schedulers find them; ``param_groups`` and ``state`` name the
    model's parameters. If you write into a parameter, its master takes the new value. FP32 parameters are updated
    directly.

    With loss scaling in the explicit style (``scaler.unscale_``, ``scaler.step``), gradients become FP32 when they are
    unscaled.

    Each FP16/BF16 parameter has an FP32 tensor as its master. In a lean layout it has 16 further bits instead
    (:mod:`hf_mp.kernels.split`), and the step joins both into the master, a block at a time.

    Args:
        optimizer: an optimizer over floating parameters; state that it already has is cast to FP32. From now on step
            the wrapper, not the optimizer itself.

    Raises:
        TypeError: for parameters that are not floating, and for anything but an optimizer; when the wrapper is copied
            or pickled.
        ValueError: for an optimizer that calls its closure several times (LBFGS).
    """

    keeps_masters = True  # its FP16 gradients may be unscaled: they become FP32
    skips_on_device = True  # whether the device may decide by found_inf, so that the host need not wait
    _step_supports_amp_scaling = False  # unlike a fused one inside: torch.amp.GradScaler unscales itself
    optimizer: Optimizer

    def __init__(self, optimizer: Optimizer) -> None:
        _check_wrappable(optimizer)
        # Before parameters become masters: torch would cast state to the 16 bits of what it belongs to.
        state_to_fp32(optimizer)
        self.optimizer = optimizer
        # The FP32 master of each 16-bit parameter that is not split, and version_and_address() of the
        # parameter when the master was written; None for a master from a checkpoint.
        self._masters: dict[nn.Parameter, tuple[Tensor, tuple[int, int, int] | None]] = {}
        self._updates = UpdateCache()
        # Not Optimizer.__init__, which would make param_groups of its own: those are the wrapped one's.
        super().__setstate__({})  # hooks, and the step that calls them
        for name, value in vars(optimizer).items():
            if name.endswith("_hooks"):
                setattr(self, name, value)
        optimizer.register_step_pre_hook(self._refuse_direct_step)
        if hasattr(optimizer, "check_overrides"):
            optimizer.check_overrides()  # bitsandbytes knows parameters with settings of their own by identity
        self._adopt(optimizer_parameters(optimizer))
        _warn_of_own_parameters(optimizer)
        if not any(map(_needs_master, optimizer_parameters(self))):
            warn_caller("MasterWeightOptimizer has nothing to do: no parameter is FP16 or BF16")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        # torch's way would leave out what is wrapped, and the masters with it.
        raise TypeError(
            "a MasterWeightOptimizer is not copied or pickled: wrap another optimizer, and load state_dict()"
        )

    def _refuse_direct_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Hook before a step of the wrapped optimizer, and of this one, which shares its hooks: refuses the former."""
        # In the wrapper's own step the groups hold FP32 masters, and after a detach FP32 parameters.
        if optimizer is self.optimizer and any(map(_needs_master, optimizer_parameters(self))):
            raise RuntimeError(
                f"this {type(optimizer).__name__} was stepped itself, but its masters are in a MasterWeightOptimizer: "
                "call step() of the optimizer that prepare(...) or MasterWeightOptimizer(...) returned"
            )

    _refuse_direct_step.is_internal = True  # type: ignore[attr-defined]

    def _adopt(self, parameters: list[nn.Parameter]) -> None:
        """Mark split ``parameters`` as having an optimizer; a TypeError for one that is not floating."""
        for parameter in parameters:
            if not (parameter.is_floating_point() or parameter.is_complex()):
                raise TypeError(
                    f"master weights are for floating parameters, not for one of {parameter.dtype} and shape "
                    f"{tuple(parameter.shape)}: leave it out of the optimizer"
                )
            if isinstance(parameter, SplitParameter):
                parameter.has_optimizer = True

    param_groups: Any = _of_wrapped("param_groups", "Those of the wrapped optimizer, over the model's parameters.")
    state: Any = _of_wrapped("state", "That of the wrapped optimizer, by the model's parameters; it is FP32.")
    defaults: Any = _of_wrapped("defaults", "Those of the wrapped optimizer.")

    def __getattr__(self, name: str) -> Any:
        """Any other attribute of the wrapped optimizer, whose methods see the FP32 values of parameters."""
        optimizer = vars(self).get("optimizer")
        if optimizer is None or name.startswith("__"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        value = getattr(optimizer, name)
        if getattr(value, "__self__", None) is not optimizer:
            return value
        # Split parameters are read and written in FP32 as they are; the masters of others are taken out for the call.
        has_whole = any(_needs_master(p) and not isinstance(p, SplitParameter) for p in optimizer_parameters(self))
        return functools.partial(self._call_on_masters, value) if has_whole else value

    @torch.no_grad()
    def _call_on_masters(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A method of the wrapped optimizer that may write parameters, as ``eval()`` of schedule-free ones."""
        with self._opened(optimizer_parameters(self)):
            return method(*args, **kwargs)

    def master(self, parameter: nn.Parameter) -> Tensor:
        """The FP32 master weight of ``parameter``, detached, of its shape; write through the parameter."""
        if isinstance(parameter, SplitParameter):
            return master_value(parameter)
        return self._whole(parameter) if _needs_master(parameter) else parameter.detach()

    @torch.no_grad()
    def _whole(self, parameter: nn.Parameter) -> Tensor:
        """The FP32 master of a 16-bit parameter, with what was written into the parameter from outside."""
        if parameter not in self._masters:
            track_data_writes(parameter)
            self._masters[parameter] = parameter.float(), version_and_address(parameter)
        master, when_written = self._masters[parameter]
        if when_written != (now := version_and_address(parameter)):
            master = _where_rounded(master.to(parameter.device), parameter.detach(), parameter.float())
            self._masters[parameter] = master, now
        return master

    def refresh(self) -> None:
        """Take over what code that leaves no trace has written into FP16/BF16 parameters, before the next step.

        Writes by torch functions and through ``parameter.data`` are taken over without it. A write through NumPy,
        DLPack, a storage or C++ code is not detected: the next step would overwrite it with the old master.
        """
        self._masters.update({parameter: (master, None) for parameter, (master, _) in self._masters.items()})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As the wrapped optimizer's; FP16/BF16 parameters get masters as well."""
        self.optimizer.add_param_group(param_group)
        self._adopt(self.param_groups[-1]["params"])

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
        """Free the gradients in a lean layout that a step with ``found_inf`` has kept."""
        for parameter in optimizer_parameters(self):
            if isinstance(parameter, SplitParameter):
                parameter.grad = None

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Clip the global 2-norm of the gradients to ``max_norm``; ``inf`` only measures.

        As ``torch.nn.utils.clip_grad_norm_`` (``error_if_nonfinite=False``), but gradients that are still scaled get no
        FP32 copies: what reads them applies the factor. Returns the unscaled norm before clipping: FP32, of shape ().
        """
        return clip_grad_norm_(optimizer_parameters(self), max_norm)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the masters, and the parameters with them.

        In a lean layout, gradients are freed as they are used, unless the device decides by ``found_inf`` whether to
        skip. ``closure`` recomputes the loss and calls ``backward``: once, before the update; its result is returned.
        """
        # The closure runs a backward, and step() is under no_grad.
        loss = None if closure is None else torch.enable_grad()(closure)()
        self.step_on(optimizer_parameters(self), vars(self).get("found_inf"))
        return loss

    @torch.no_grad()
    def step_on(self, parameters: list[nn.Parameter], found_inf: Tensor | None = None) -> None:
        """Update only these parameters; the hooks of a step are called by :meth:`step`, not here.

        If ``found_inf`` is not 0, the device skips the update, in torch's fused step as well; gradients are kept for
        overflow reports.
        """
        with as_stored():
            stepped = fused_step_split(self.optimizer, parameters, self._updates, found_inf)
            left = [p for p in parameters if id(p) not in stepped and has_gradient(p)]
        if left or not stepped:
            with contextlib.nullcontext() if found_inf is None else with_found_inf(self.optimizer, found_inf):
                for bucket in self._buckets(left if stepped else parameters):
                    self._step_on(bucket, keeps_gradients=found_inf is not None)

    def _step_on(self, parameters: list[nn.Parameter], *, keeps_gradients: bool) -> None:
        """Step the wrapped optimizer on the masters of ``parameters``, and free the gradients of split ones."""
        with self._opened(parameters) as masters:
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
        """Call the wrapped optimizer's step without the hooks of a step, which this object's own step calls."""
        optimizer: Any = self.optimizer
        if replaces_step(vars(optimizer).get("step")):
            optimizer.step()
            return
        # Not the function that fires hooks: in a step of several parts they would be called for each.
        optimizer._opt_called = True  # for LR schedulers made before
        step = type(optimizer).step
        (step.__wrapped__ if getattr(step, "hooked", False) else step)(optimizer)

    def _open(self, parameter: nn.Parameter) -> nn.Parameter:
        """What the wrapped optimizer updates in the place of ``parameter``."""
        if not _needs_master(parameter):
            return parameter
        value = parameter.fp32_value() if isinstance(parameter, SplitParameter) else self._whole(parameter)
        # A parameter: torch takes its fast paths for exact types alone.
        return nn.Parameter(value, requires_grad=parameter.requires_grad)

    @contextlib.contextmanager
    def _opened(self, parameters: Sequence[nn.Parameter]) -> Iterator[dict[nn.Parameter, nn.Parameter]]:
        """Have the wrapped optimizer see the masters of ``parameters`` alone, and take over what it writes."""
        masters = {parameter: self._open(parameter) for parameter in parameters}
        with self._in_place_of_parameters(masters):
            yield masters
        for parameter, master in masters.items():
            if isinstance(parameter, SplitParameter):
                parameter.write_fp32(master.detach())
            elif master is not parameter:
                parameter.copy_(master)
                self._masters[parameter] = master.detach(), version_and_address(parameter)

    def _buckets(self, parameters: list[nn.Parameter]) -> list[list[nn.Parameter]]:
        """``parameters`` in parts to step one after the other; in one where the optimizer may look at all together."""
        if not steps_by_parameter(self.optimizer):
            return [parameters]
        # A whole FP32 master for as few parameters at once as keeps the number of the optimizer's launches low.
        buckets: list[list[nn.Parameter]] = [[]]
        elements = 0
        for parameter in filter(has_gradient, parameters):
            added = parameter.numel() if isinstance(parameter, SplitParameter) else 0  # others are there already
            if elements and elements + added > _BUCKET_ELEMENTS:
                buckets.append([])
                elements = 0
            buckets[-1].append(parameter)
            elements += added
        return buckets

    @contextlib.contextmanager
    def _in_place_of_parameters(self, masters: Mapping[nn.Parameter, nn.Parameter]) -> Iterator[None]:
        """Have the wrapped optimizer see ``masters``; parameters that have none there are hidden from it."""
        # Without a gradient, so that the wrapped optimizer passes over it, in the place that its state's index counts.
        absent = nn.Parameter(torch.empty(0), requires_grad=False)
        shown = [[masters.get(parameter, absent) for parameter in group["params"]] for group in self.param_groups]
        hidden = [list(group["params"]) for group in self.param_groups]
        self._show(shown, masters)
        try:
            yield
        finally:
            self._show(hidden, {master: parameter for parameter, master in masters.items()})

    def _show(self, groups: list[list[nn.Parameter]], renamed: Mapping[nn.Parameter, nn.Parameter]) -> None:
        """Put ``groups`` into the wrapped optimizer's, and move its state by parameter to what ``renamed`` says."""
        # In place: an optimizer may keep the list of its group.
        for group, parameters in zip(self.param_groups, groups, strict=True):
            group["params"][:] = parameters
        # Its state and other dictionaries by parameter, and those of optimizers inside it.
        held = [one for each in optimizers_in(self.optimizer) for one in (each.state, *vars(each).values())]
        for state in [one for one in held if isinstance(one, dict)]:
            for before in [key for key in state if isinstance(key, nn.Parameter)]:
                if (after := renamed.get(before)) is not None and after is not before:
                    state[after] = state.pop(before)

    def _device_of_state(self, parameter: nn.Parameter) -> torch.device:
        """Where the loaded state of ``parameter`` goes."""
        return parameter.device

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's state, and under ``masters`` the FP32 masters that no model's ``state_dict()`` holds.

        ``masters`` maps the index of a parameter (as in ``state``) to an FP32 tensor of its shape. Models in a lean
        layout save their masters themselves. Other optimizers can load the state, without masters.
        """
        saved = {index: self.master(p) for index, p in enumerate(optimizer_parameters(self)) if p in self._masters}
        return {**self.optimizer.state_dict(), "masters": saved}

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what :meth:`state_dict` returned, bit for bit.

        The model's weights may be loaded before or after: at the first step, a loaded master is used if the parameter
        is its rounding. In a lean layout masters take effect at once, so load the weights first. A state of the wrapped
        optimizer alone is accepted, too: the masters are then taken from the parameters.

        Raises:
            ValueError: for masters of another shape or dtype, and as ``torch.optim.Optimizer.load_state_dict``.
        """
        parameters = optimizer_parameters(self)
        given: Mapping[int, Tensor] = state_dict.get("masters", {})
        _check_masters(given, parameters)
        # torch casts loaded state to the dtype of its parameter: to FP32, if it sees a FP32 one.
        shown = {
            p: nn.Parameter(torch.empty(0, dtype=torch.float32, device=self._device_of_state(p)))
            if _needs_master(p)
            else p
            for p in parameters
        }
        with self._in_place_of_parameters(shown):
            self.optimizer.load_state_dict({key: state_dict[key] for key in state_dict if key != "masters"})
        self._masters.clear()
        for index, tensor in given.items():
            parameter, master = parameters[index], tensor.detach().clone()
            if isinstance(parameter, SplitParameter):
                master, own = (one.to(parameter.device) for one in (master, self.master(parameter)))
                parameter.write_fp32(_where_rounded(master, parameter.detach(), own))
            elif _needs_master(parameter):
                track_data_writes(parameter)
                self._masters[parameter] = master, None


@on_stored_values
def clip_grad_norm_(parameters: Sequence[nn.Parameter], max_norm: float) -> Tensor:
    """:meth:`MasterWeightOptimizer.clip_grad_norm_`, of any parameters."""
    norms: list[tuple[Tensor, Tensor | None]] = []  # scaled, with the factors that unscale them
    by_factor: dict[tuple[torch.device, Tensor | None], list[Tensor]] = {}
    for parameter in parameters:
        gradient, factor = gradient_and_factor(parameter)
        if gradient is None:
            continue
        values = real_values(gradient)
        if is_on_host(values):  # one by one, in this order: an update inside backward adds the same numbers
            norms.append((tensor_norm(values), factor))
        else:  # in one launch
            by_factor.setdefault((values.device, factor), []).append(values)
    norms += [(total_norm(values), factor) for (_, factor), values in by_factor.items()]
    total = norm_of([norm if factor is None else norm * factor.squeeze() for norm, factor in norms])
    if math.isfinite(max_norm):
        multiply_gradients(parameters, clip_factor(total, max_norm))
    return total


def _check_wrappable(optimizer: Any) -> None:
    """Raise a TypeError for anything but an optimizer, and for a wrapped one; a ValueError for LBFGS."""
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"MasterWeightOptimizer wraps an optimizer, not {optimizer!r}: give it "
            "torch.optim.AdamW(model.parameters()) or the like"
        )
    if isinstance(optimizer, MasterWeightOptimizer):
        raise TypeError("this optimizer is a MasterWeightOptimizer already: wrap one only once")
    check_closure(optimizer)


def _warn_of_own_parameters(optimizer: Optimizer) -> None:
    """Warn if ``optimizer`` lists 16-bit parameters outside of ``param_groups``, where it sees no masters."""
    groups = [group["params"] for group in optimizer.param_groups]
    for name, held in vars(optimizer).items():
        is_list = isinstance(held, (list, tuple)) and all(held is not group for group in groups)
        if is_list and any(isinstance(one, nn.Parameter) and _needs_master(one) for one in held):
            warn_caller(
                f"{type(optimizer).__name__}.{name} lists 16-bit parameters, and updates made through it are lost: "
                "during a step, only param_groups has the FP32 masters and their gradients. Have the optimizer read "
                "param_groups, or use 'fp16' or 'bf16'"
            )


def _check_masters(given: Any, parameters: Sequence[nn.Parameter]) -> None:
    """Raise a ValueError for masters of a checkpoint that do not fit these parameters."""
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
    """``master`` where ``working`` is its rounding, element by element: a row that was written costs no other its bits.

    Ties may have been rounded as torch does, or as split masters are.
    """
    is_rounding = (master.to(working.dtype) == working) | (split(master, working.dtype).working == working)
    return torch.where(is_rounding, master, otherwise)


def _needs_master(parameter: Tensor) -> bool:
    return parameter.dtype in LOWER_PRECISION_DTYPES


def steps_by_parameter(optimizer: Optimizer) -> bool:
    """Whether ``optimizer`` is known to treat each parameter by itself."""
    theirs: Any = next(kind for kind in type(optimizer).__mro__ if kind.__module__.startswith(_STEP_BY_PARAMETER))
    # A subclass with a step of its own may look at all parameters together; at the latest, torch's Optimizer is found.
    return inspect.unwrap(type(optimizer).step) is inspect.unwrap(theirs.step)
