"""Fused AdamW updates that replace ``optimizer.step()``."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Adam, AdamW, Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from hf_mp.kernels.adamw import AdamWSettings, AdamWTensors, JoinBuffer, adamw_, is_small
from hf_mp.kernels.registry import VARIABLE, kernel_for
from hf_mp.kernels.tensors import is_on_host, is_ordinary, traits_of
from hf_mp.model_index import optimizer_parameters
from hf_mp.weights.split_parameter import SplitParameter, gradient_and_factor
from hf_mp.weights.working_copies import WorkingCopies


class Clipping(NamedTuple):
    """Clipping of gradients of 2-norm ``norm``, FP32 of shape (), to ``max_norm`` in an update."""

    parameters: Sequence[nn.Parameter]
    max_norm: float
    norm: Tensor


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """Return the factor of ``clip_grad_norm_`` for gradients of 2-norm ``norm``; FP32 of shape ()."""
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)


class LaunchBatch(Protocol):
    """Tensors of one kernel launch, for :class:`UpdateCache`."""

    @property
    def parameters(self) -> Sequence[Any]: ...

    def launch_key(self) -> Any:
        """Return the key of a prepared kernel; None without optimizer state."""

    def make_update(self) -> Any:
        """Return the kernel, or None if it does not support all tensors."""


def launch_key(written: Sequence[Tensor], gradients: Sequence[Tensor], of_batch: Any) -> Any:
    """Return the key of a launch that writes ``written``; ``of_batch`` is compared too."""
    return os.environ.get(VARIABLE), of_batch, traits_of(written), traits_of(gradients)[1:]  # addresses differ


def make_kernel(tensors: Sequence[AdamWTensors], counts: Sequence[int]) -> Any:
    """Return the kernel for ``tensors`` in groups of ``counts``; None if it does not support all of them."""
    floating = [one for each in tensors for one in each[:-1] if one is not None]  # no int16 remainders
    kernel = kernel_for("adamw", floating)
    return None if kernel is None else kernel(tensors, counts)


class _Batch(NamedTuple):
    """Tensors of one kernel launch, in the same order."""

    optimizer: Optimizer
    parameters: Sequence[nn.Parameter]
    counts: Sequence[int]  # parameters in each group
    gradients: Sequence[Tensor]
    others: Sequence[Tensor | None]  # working copies or remainders

    def launch_key(self) -> Any:
        states = [self.optimizer.state.get(parameter, {}) for parameter in self.parameters]
        try:
            moments = [state[name] for name in ("exp_avg", "exp_avg_sq", "step") for state in states]
        except KeyError:
            return None
        # Addresses too: `.data` of any of them may have been set, even to a view of itself.
        written = [*moments, *self.parameters, *[other for other in self.others if other is not None]]
        return launch_key(written, self.gradients, self.counts)

    def make_update(self) -> Any:
        if kernel_for("adamw", [*self.parameters, *self.gradients]) is None:  # before any state is made
            return None
        each = zip(self.parameters, self.gradients, self.others, strict=True)
        found = [_tensors_of(self.optimizer, *its) for its in each]
        supported = [tensors for tensors in found if tensors is not None]
        # Checks the state too: that of a checkpoint may have another dtype or memory order.
        return None if len(supported) < len(found) else make_kernel(supported, self.counts)


class UpdateCache:
    """Join buffer (CPU) and prepared kernels (GPU) of one optimizer."""

    def __init__(self) -> None:
        self.room = JoinBuffer()
        self._kernels: dict[int, tuple[Any, Any]] = {}  # launch key and kernel, by identity of the first parameter

    def get(self, batch: LaunchBatch) -> Any:
        """Return the kernel of an unchanged launch key, or a new one; None if it does not support all tensors."""
        first = id(batch.parameters[0])
        launch_key, update = self._kernels.pop(first, (None, None))
        if launch_key is None or launch_key != batch.launch_key():
            update = batch.make_update()
            launch_key = batch.launch_key()  # make_update() may have made the optimizer's state
        if update is not None:
            self._kernels[first] = launch_key, update
        return update


def fused_step_split(
    optimizer: Optimizer, parameters: list[nn.Parameter], updates: UpdateCache, found_inf: Tensor | None = None
) -> set[int]:
    """Update the split ``parameters`` that have a gradient and are in :func:`fused_groups`; return their ids.

    ``optimizer`` has to step the others. A large parameter on a CPU is updated alone. Gradients are freed unless
    ``found_inf``, FP32 of shape (), is given; if it is not 0, nothing is written.
    """
    stepped = set[int]()
    if not is_torchs_adam(optimizer, vars(optimizer).get("step")):
        return stepped
    selected = set(map(id, parameters))  # a tensor's own hash is slow
    for settings, group in fused_groups(optimizer):
        step = functools.partial(_update_split, optimizer, updates, settings, found_inf)
        # By contiguity too, because no kernel supports other tensors.
        batches: dict[tuple[torch.device, Tensor | None, bool], list[tuple[SplitParameter, Tensor]]] = {}
        for parameter in group:
            if not isinstance(parameter, SplitParameter) or id(parameter) not in selected:
                continue
            gradient, factor = gradient_and_factor(parameter)
            if gradient is None:
                continue
            if parameter.device.type == "cpu" and not is_small(gradient):
                stepped |= step(factor, [(parameter, gradient)])
            else:
                is_contiguous = gradient.is_contiguous() and parameter.is_contiguous()
                batches.setdefault((parameter.device, factor, is_contiguous), []).append((parameter, gradient))
        for (_, factor, _), batch in batches.items():
            stepped |= step(factor, batch)
    optimizer._opt_called = True  # type: ignore[attr-defined]  # read by LR schedulers
    return stepped


def _update_split(
    optimizer: Optimizer,
    updates: UpdateCache,
    settings: AdamWSettings,
    found_inf: Tensor | None,
    factor: Tensor | None,
    batch: list[tuple[SplitParameter, Tensor]],
) -> set[int]:
    """Update the parameters of ``batch`` that a kernel supports, from gradients times ``factor``; return their ids."""
    parameters, gradients = [parameter for parameter, _ in batch], [gradient for _, gradient in batch]
    is_launched = parameters[0].device.type != "cpu" or kernel_for("adamw", gradients) is not None
    if is_launched:
        for parameter in parameters:
            parameter.reset_written_remainders()
        remainders = [parameter.remainder_bits for parameter in parameters]
        update = updates.get(_Batch(optimizer, parameters, [len(batch)], gradients, remainders))
        if update is None:
            return set()
        update(gradients, [settings], factor, found_inf)
    else:
        tensors = [_tensors_of(optimizer, parameter, gradient) for parameter, gradient in batch]
        parameters = [parameter for parameter, its in zip(parameters, tensors, strict=True) if its is not None]
        if not parameters:
            return set()
        adamw_([its for its in tensors if its is not None], settings, factor, found_inf, updates.room)
    SplitParameter.note_written(*parameters)
    if found_inf is None:  # otherwise an overflow report may read the gradients
        for parameter in parameters:
            parameter.grad = None
    return set(map(id, parameters))


def can_skip_on_device(optimizer: Optimizer, replaced_step: Callable[..., Any] | None) -> bool:
    """Whether ``found_inf`` can skip the step of ``optimizer`` on its device, without a hook that observes it.

    ``replaced_step`` is the ``step`` attribute of the instance before it was guarded, or None.
    """
    if not getattr(optimizer, "skips_on_device", True):
        return False
    # A MasterWeightOptimizer steps the optimizer that it wraps.
    if replaced_step is None and hasattr(optimizer, "keeps_masters") and not has_hooks(optimizer):
        optimizer = optimizer.optimizer  # type: ignore[attr-defined]
        replaced_step = vars(optimizer).get("step")
    is_fused = is_torchs_adam(optimizer, replaced_step) and all(group.get("fused") for group in optimizer.param_groups)
    return is_fused and not has_hooks(optimizer)


@contextlib.contextmanager
def with_found_inf(optimizer: Any, found_inf: Tensor) -> Iterator[None]:
    """Context in which the step of ``optimizer`` changes nothing if ``found_inf`` is 1."""
    optimizer.found_inf = found_inf  # as torch.amp.GradScaler does
    try:
        yield
    finally:
        del optimizer.found_inf


def try_fused_step_whole(
    optimizer: Optimizer,
    replaced_step: Callable[..., Any] | None,
    copies: WorkingCopies,
    updates: UpdateCache,
    clipping: Clipping | None = None,
    found_inf: Tensor | None = None,
) -> bool:
    """Clip, and update FP32 parameters and working copies, in one launch; False if there is no kernel for all.

    ``found_inf`` is FP32 of shape (); if it is not 0, the kernel writes nothing. ``replaced_step`` is as for
    :func:`can_skip_on_device`.
    """
    stepping: list[Any] = [parameter for parameter in optimizer_parameters(optimizer) if parameter.grad is not None]
    if kernel_for("adamw", stepping[:1]) is None:  # no kernel on a CPU
        return False
    if not is_torchs_adam(optimizer, replaced_step) or has_hooks(optimizer):
        return False
    counted = [(settings, sum([p.grad is not None for p in group])) for settings, group in fused_groups(optimizer)]
    all_settings = [settings for settings, count in counted if count]
    counts = [count for _, count in counted if count]
    if sum(counts) < len(stepping):
        return False
    gradients = [parameter.grad for parameter in stepping]
    update = updates.get(_Batch(optimizer, stepping, counts, gradients, copies.copies_of(stepping)))
    if update is None:
        return False
    factor = None if clipping is None else clip_factor(clipping.norm, clipping.max_norm)
    update(gradients, all_settings, factor, found_inf)
    copies.note_written(stepping)
    optimizer._opt_called = True  # type: ignore[attr-defined]
    return True


def is_torchs_adam(optimizer: Any, replaced_step: Callable[..., Any] | None) -> bool:
    """Whether ``optimizer`` runs the unchanged step of torch's Adam or AdamW."""
    if type(optimizer) not in (Adam, AdamW) or replaces_step(replaced_step):
        return False
    return inspect.unwrap(type(optimizer).step).__module__ == Adam.__module__


def has_hooks(optimizer: Any) -> bool:
    """Whether ``optimizer`` has step hooks that are not hf_mp's."""  # torch has no public API to list hooks
    before = (*optimizer._optimizer_step_pre_hooks.values(), *_global_optimizer_pre_hooks.values())
    after = (*optimizer._optimizer_step_post_hooks.values(), *_global_optimizer_post_hooks.values())
    return not all([hasattr(hook, "is_internal") for hook in (*before, *after)])


def replaces_step(replaced_step: Callable[..., Any] | None) -> bool:
    """Whether ``replaced_step`` is more than the wrapper of an LR scheduler, which calls the step of the class."""
    return replaced_step is not None and not hasattr(replaced_step, "_wrapped_by_lr_sched")


def fused_groups(optimizer: Optimizer) -> Iterator[tuple[AdamWSettings, Sequence[nn.Parameter]]]:
    """Yield the settings and parameters of the groups with ``fused=True`` that the kernel supports."""
    for group in optimizer.param_groups:
        lr, weight_decay = group["lr"], group["weight_decay"]
        others = (*group["betas"], group["eps"], weight_decay)  # in the order of AdamWSettings
        is_lr_on_device, *others_on_device = [isinstance(n, Tensor) and not is_on_host(n) for n in (lr, *others)]
        # The kernel reads the learning rate on the device of the parameters; torch's own step moves it there.
        is_lr_elsewhere = is_lr_on_device and any(parameter.device != lr.device for parameter in group["params"])
        has_other_options = group["amsgrad"] or group["maximize"] or group["differentiable"]
        is_adamw = group["decoupled_weight_decay"] or not weight_decay  # Adam without decay is AdamW
        if group.get("fused") and is_adamw and not (is_lr_elsewhere or has_other_options or any(others_on_device)):
            lr = lr if is_lr_on_device else float(lr)  # no copy to the host
            yield AdamWSettings(lr, *map(float, others)), group["params"]


def _tensors_of(
    optimizer: Optimizer, parameter: nn.Parameter, gradient: Tensor, copy: Tensor | None = None
) -> AdamWTensors | None:
    """Return the tensors of an update of ``parameter`` and its working ``copy``; None without a kernel for them."""
    weight: Any  # FP32 weight or None, working copy, remainder
    if isinstance(parameter, SplitParameter):
        weight = None, *parameter.read_halves()
    elif parameter.dtype is torch.float32:
        is_stale = copy is not None and copy.shape != parameter.shape  # `parameter.data` was set
        weight = parameter, None if is_stale else copy
    else:
        return None
    moments = _moments(optimizer, parameter, gradient)
    return None if moments is None else AdamWTensors(gradient, *moments, *weight)


def _moments(optimizer: Optimizer, parameter: nn.Parameter, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return the moments and the step of ``parameter``, new ones if its state is empty; None without a kernel."""
    shape, device = parameter.shape, parameter.device
    # `parameter.data` may have been set since torch compared the shapes.
    if not is_ordinary(gradient) or gradient.is_sparse or gradient.shape != shape or gradient.device != device:
        return None
    state = optimizer.state[parameter]
    if not state:
        make = functools.partial(torch.zeros, dtype=torch.float32, device=device)
        state.update(step=make(()), exp_avg=make(shape), exp_avg_sq=make(shape))
    for name in ("exp_avg", "exp_avg_sq"):
        # Loaded state may be channels-last, and torch's fused step reads it in the memory order of contiguous masters.
        moment = state[name] = state[name].contiguous()
        if moment.shape != shape:
            raise ValueError(  # a kernel would write beyond its end
                f"{name} has shape {tuple(moment.shape)}, but its parameter {tuple(shape)}: the state of this "
                "optimizer is that of another model"
            )
    moments = state["exp_avg"], state["exp_avg_sq"], state["step"]
    is_usable = all([moment.dtype is torch.float32 and moment.device == device for moment in moments])
    return moments if is_usable else None
