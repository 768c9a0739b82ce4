"""The fused AdamW kernel in the place of an optimizer's own step."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Adam, AdamW, Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from hf_mp.kernels.adamw import AdamWSettings, AdamWTensors, Room, adamw_, is_small
from hf_mp.kernels.registry import VARIABLE, kernel_for
from hf_mp.kernels.tensors import is_on_host, is_ordinary, traits_of
from hf_mp.model_walk import optimizer_parameters
from hf_mp.weights.split_parameter import SplitParameter, gradient_and_factor, updated_remainders
from hf_mp.weights.working_copies import WorkingCopies


class Clipping(NamedTuple):
    """Gradients that an update scales down to a 2-norm of ``max_norm``, from ``norm``, FP32 of shape ()."""

    parameters: Sequence[nn.Parameter]
    max_norm: float
    norm: Tensor


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """What ``torch.nn.utils.clip_grad_norm_`` multiplies gradients of 2-norm ``norm`` with, FP32 of shape ()."""
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)


class _Batch(NamedTuple):
    """What one step of a kernel updates: ``gradients`` and ``others`` in the order of ``parameters``."""

    optimizer: Optimizer
    parameters: Sequence[nn.Parameter]
    counts: Sequence[int]  # of parameters in each group
    gradients: Sequence[Tensor]
    others: Sequence[Tensor | None]  # their working copies or, of split ones, their remainders

    def look(self) -> Any:
        """What a kernel is made for, without addresses of gradients, to compare; None where there is no state."""
        states = [self.optimizer.state.get(parameter, {}) for parameter in self.parameters]
        try:
            moments = [state[name] for name in ("exp_avg", "exp_avg_sq", "step") for state in states]
        except KeyError:
            return None
        # Somebody may have set `.data` of any of them, of a parameter also to a view of itself.
        written = traits_of([*moments, *self.parameters, *[other for other in self.others if other is not None]])
        return os.environ.get(VARIABLE), self.counts, written, traits_of(self.gradients)[1:]

    def make_update(self) -> Any:
        """The kernel for this batch; None where it cannot take all of it."""
        if kernel_for("adamw", [*self.parameters, *self.gradients]) is None:  # before any state is made
            return None
        tensors_of = functools.partial(_tensors_of, self.optimizer)
        found = list(map(tensors_of, self.parameters, self.gradients, self.others))
        given = [tensors for tensors in found if tensors is not None]
        # Asked again with the state, which a checkpoint may have brought in another dtype or order.
        kernel = kernel_for("adamw", [one for tensors in given for one in tensors[:-1] if one is not None])
        return None if kernel is None or len(given) < len(found) else kernel(given, self.counts)


class UpdateCache:
    """What the steps of one optimizer share: room for those of a CPU, and on a GPU the kernel's tables of its tensors.

    A step looks where they are; only where something has changed does it ask whether the kernel can take them.
    """

    def __init__(self) -> None:
        self.room = Room()
        self._kept: dict[int, tuple[list[Any], Any]] = {}  # by the identity of the first parameter

    def of(self, batch: _Batch) -> Any:
        """The kernel for a step of ``batch``; None where it cannot take all of it."""
        key = id(batch.parameters[0])
        look, update = self._kept.pop(key, (None, None))
        if look is None or look != batch.look():
            update = batch.make_update()
            look = batch.look()  # again: the optimizer's state may have been made
        if update is not None:
            self._kept[key] = look, update
        return update


def fused_step_split(
    optimizer: Optimizer, parameters: list[nn.Parameter], updates: UpdateCache, found_inf: Tensor | None = None
) -> set[int]:
    """Update those split ``parameters`` whose step a kernel can take in the place of ``optimizer``.

    Those have a gradient, in a group of ``torch.optim.AdamW``, or of ``Adam`` without decay, with ``fused=True`` and
    without ``amsgrad`` and ``maximize``. On a CPU :func:`adamw_` takes large parameters one by one; on a GPU one launch
    of the Triton kernel takes all. Gradients are freed as they are used, unless there is a ``found_inf``, FP32 of shape
    (): where it is not 0, nothing is written.

    Returns:
        The identities of the updated parameters; ``optimizer`` has to step all others itself.
    """
    stepped = set[int]()
    if not is_torchs_adam(optimizer, vars(optimizer).get("step")):
        return stepped
    wanted = set(map(id, parameters))  # a tensor's own hash is slow, where this is called for one parameter at a time
    for settings, group in fused_groups(optimizer):
        step = functools.partial(_update_split, optimizer, updates, settings, found_inf)
        # By contiguity, too: the others do not wait for what no kernel takes.
        batches: dict[tuple[torch.device, Tensor | None, bool], list[tuple[SplitParameter, Tensor]]] = {}
        for parameter in group:
            if not isinstance(parameter, SplitParameter) or id(parameter) not in wanted:
                continue
            gradient, factor = gradient_and_factor(parameter)
            if gradient is None:
                continue
            if parameter.device.type == "cpu" and not is_small(gradient):
                stepped |= step(factor, [(parameter, gradient)])
            else:
                kind = parameter.device, factor, gradient.is_contiguous() and parameter.is_contiguous()
                batches.setdefault(kind, []).append((parameter, gradient))
        for (_, factor, _), batch in batches.items():
            stepped |= step(factor, batch)
    optimizer._opt_called = True  # type: ignore[attr-defined]  # for LR schedulers made before
    return stepped


def _update_split(
    optimizer: Optimizer,
    updates: UpdateCache,
    settings: AdamWSettings,
    found_inf: Tensor | None,
    factor: Tensor | None,
    batch: list[tuple[SplitParameter, Tensor]],
) -> set[int]:
    """Update the parameters of ``batch`` that a kernel takes, from their gradients times ``factor``; as above."""
    parameters, gradients = [parameter for parameter, _ in batch], [gradient for _, gradient in batch]
    if parameters[0].device.type == "cpu" and kernel_for("adamw", gradients) is None:
        found = [(one, tensors) for one, g in batch if (tensors := _tensors_of(optimizer, one, g)) is not None]
        if not found:
            return set()
        adamw_([tensors for _, tensors in found], settings, factor, found_inf, updates.room)
        parameters = [parameter for parameter, _ in found]
    elif update := updates.of(_Batch(optimizer, parameters, [len(batch)], gradients, updated_remainders(parameters))):
        update(gradients, [settings], factor, found_inf)
    else:
        return set()  # the optimizer itself steps what no kernel takes
    SplitParameter.note_written(*parameters)
    # Where the device may skip, a report of an overflow reads the gradients afterwards.
    for parameter in parameters if found_inf is None else ():
        parameter.grad = None
    return set(map(id, parameters))


def can_skip_on_device(optimizer: Optimizer, replaced_step: Callable[..., Any] | None) -> bool:
    """Whether the step of ``optimizer`` skips by itself where its ``found_inf`` is 1, and nobody hears of a step.

    ``replaced_step`` is what stood in the place of its class's ``step`` before it was guarded. Of a
    :class:`~hf_mp.weights.master_weight_optimizer.MasterWeightOptimizer`, the wrapped one skips.
    """
    if not getattr(optimizer, "skips_on_device", True):
        return False
    if replaced_step is None and hasattr(optimizer, "keeps_masters") and not has_hooks(optimizer):
        optimizer = optimizer.optimizer  # type: ignore[attr-defined]
        replaced_step = vars(optimizer).get("step")
    is_fused = is_torchs_adam(optimizer, replaced_step) and all(group.get("fused") for group in optimizer.param_groups)
    return is_fused and not has_hooks(optimizer)


@contextlib.contextmanager
def with_found_inf(optimizer: Any, found_inf: Tensor) -> Iterator[None]:
    """A context in which the step of ``optimizer`` does nothing where ``found_inf`` is 1."""
    optimizer.found_inf = found_inf  # as torch.amp.GradScaler tells it
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
    """Update FP32 parameters and their working copies in one launch, where the Triton kernel is used for all of them.

    The kernel clips the gradients as it reads them, and writes nothing where ``found_inf``, FP32 of shape (), is not 0.
    ``replaced_step`` as for :func:`can_skip_on_device`. False: no parameter was written.
    """
    stepping: list[Any] = [parameter for parameter in optimizer_parameters(optimizer) if parameter.grad is not None]
    if kernel_for("adamw", stepping[:1]) is None:  # on a CPU the first one answers for all
        return False
    if not is_torchs_adam(optimizer, replaced_step) or has_hooks(optimizer):
        return False
    found = [(settings, sum([p.grad is not None for p in group])) for settings, group in fused_groups(optimizer)]
    counts = [count for _, count in found if count]
    if sum(counts) < len(stepping):
        return False
    gradients = [parameter.grad for parameter in stepping]
    update = updates.of(_Batch(optimizer, stepping, counts, gradients, copies.copies_of(stepping)))
    if update is None:
        return False
    factor = None if clipping is None else clip_factor(clipping.norm, clipping.max_norm)
    update(gradients, [settings for settings, count in found if count], factor, found_inf)
    copies.note_written(stepping)
    optimizer._opt_called = True  # type: ignore[attr-defined]
    return True


def is_torchs_adam(optimizer: Any, replaced_step: Callable[..., Any] | None) -> bool:
    if type(optimizer) not in (Adam, AdamW) or replaces_step(replaced_step):
        return False
    # A step that somebody patched into torch's class does more than the kernel would.
    return inspect.unwrap(type(optimizer).step).__module__ == Adam.__module__


def has_hooks(optimizer: Any) -> bool:
    """Whether a step of ``optimizer`` calls hooks that are not hf_mp's."""
    # torch has no public way to list hooks, neither an optimizer's own nor those of all optimizers.
    before = (*optimizer._optimizer_step_pre_hooks.values(), *_global_optimizer_pre_hooks.values())
    after = (*optimizer._optimizer_step_post_hooks.values(), *_global_optimizer_post_hooks.values())
    return not all([hasattr(hook, "is_internal") for hook in (*before, *after)])


def replaces_step(replaced_step: Callable[..., Any] | None) -> bool:
    """Whether ``replaced_step``, set on an optimizer, is not an LR scheduler's wrapper, which calls the class's."""
    return replaced_step is not None and not hasattr(replaced_step, "_wrapped_by_lr_sched")


def fused_groups(optimizer: Optimizer) -> Iterator[tuple[AdamWSettings, Sequence[nn.Parameter]]]:
    """The groups whose settings the kernel has."""
    for group in optimizer.param_groups:
        numbers = (group["lr"], *group["betas"], group["eps"], group["weight_decay"])
        on_device = [isinstance(number, Tensor) and not is_on_host(number) for number in numbers]
        # The kernel reads a learning rate where its parameters are; torch's own step moves it there.
        is_elsewhere = on_device[0] and any(parameter.device != group["lr"].device for parameter in group["params"])
        unknown = (is_elsewhere, group["amsgrad"], group["maximize"], group["differentiable"], *on_device[1:])
        # Adam's decay goes into the gradient, which no kernel does; without decay it is AdamW.
        is_adamw = group.get("fused") and not any(unknown) and (group["decoupled_weight_decay"] or not numbers[-1])
        if is_adamw:
            lr = group["lr"] if on_device[0] else float(group["lr"])  # the host does not read it
            yield AdamWSettings(lr, *map(float, numbers[1:])), group["params"]


def _tensors_of(
    optimizer: Optimizer, parameter: nn.Parameter, gradient: Tensor, copy: Tensor | None = None
) -> AdamWTensors | None:
    """What an update needs of ``parameter``, with its working ``copy``; None where the optimizer steps itself."""
    weight: Any
    if isinstance(parameter, SplitParameter):
        weight = None, *parameter.read_halves()
    elif parameter.dtype is torch.float32:
        is_stale = copy is not None and copy.shape != parameter.shape  # of what `parameter.data` was before
        weight = parameter, None if is_stale else copy
    else:
        return None
    moments = _moments(optimizer, parameter, gradient)
    return None if moments is None else AdamWTensors(gradient, *moments, *weight)


def _moments(optimizer: Optimizer, parameter: nn.Parameter, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
    """First and second moment and step, made in the state where it is empty; None if no kernel can use them.

    Raises:
        ValueError: for moments of another shape.
    """
    shape, device = parameter.shape, parameter.device
    # torch compares shapes when a gradient is set; `parameter.data` may have been set since.
    if not is_ordinary(gradient) or gradient.is_sparse or gradient.shape != shape or gradient.device != device:
        return None  # a sparse one is refused by the optimizer itself
    state = optimizer.state[parameter]
    if not state:
        make = functools.partial(torch.zeros, dtype=torch.float32, device=device)
        state.update(step=make(()), exp_avg=make(shape), exp_avg_sq=make(shape))
    for name in ("exp_avg", "exp_avg_sq"):
        # Those of a channels-last parameter, loaded: torch's fused step reads by position, and masters are contiguous.
        moment = state[name] = state[name].contiguous()
        if moment.shape != shape:
            raise ValueError(  # a kernel would write beyond its end
                f"{name} has shape {tuple(moment.shape)}, but its parameter {tuple(shape)}: the state of this "
                "optimizer is that of another model"
            )
    moments = state["exp_avg"], state["exp_avg_sq"], state["step"]
    is_usable = all([moment.dtype is torch.float32 and moment.device == device for moment in moments])
    return moments if is_usable else None
