"""The fused AdamW kernel in the place of an optimizer's own step, for split parameters."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Adam, AdamW, Optimizer

from hf_mp.kernels.adamw import AdamWSettings, AdamWTensors, adamw_
from hf_mp.master_weights.split_parameter import SplitParameter, gradient_and_factor, halves_of, note_written_halves


def step_fused(optimizer: Optimizer, parameters: list[nn.Parameter]) -> bool:
    """Update those split ``parameters`` of which :func:`hf_mp.kernels.adamw.adamw_` does what ``optimizer`` would.

    That is ``torch.optim.AdamW`` and ``Adam`` with ``fused=True``, without ``amsgrad``. Gradients are freed as they are
    used, and what was not updated keeps its own.

    Returns:
        Whether anything was updated.
    """
    if not _is_fused_adam(optimizer):
        return False
    wanted = set(parameters)
    stepped = False
    for group in optimizer.param_groups:
        if (settings := _settings(group)) is None:
            continue
        for parameter in group["params"]:
            if parameter in wanted and (given := _tensors(optimizer, parameter)) is not None:
                adamw_([given[0]], settings, given[1])
                note_written_halves(parameter)
                parameter.grad = None
                stepped = True
    if stepped:
        optimizer._opt_called = True  # type: ignore[attr-defined]  # for LR schedulers made before
    return stepped


def _is_fused_adam(optimizer: Any) -> bool:
    own_step = vars(optimizer).get("step")
    if type(optimizer) not in (Adam, AdamW) or (own_step is not None and not hasattr(own_step, "_wrapped_by_lr_sched")):
        return False
    replaced = inspect.unwrap(type(optimizer).step).__module__ != Adam.__module__
    scales = any(getattr(optimizer, name, None) is not None for name in ("grad_scale", "found_inf"))
    return not replaced and not scales


def _settings(group: dict[str, Any]) -> AdamWSettings | None:
    """The hyperparameters of ``group``; None for those that the kernel does not have."""
    lr, (beta1, beta2), eps, weight_decay = (group[name] for name in ("lr", "betas", "eps", "weight_decay"))
    numbers = (lr, beta1, beta2, eps, weight_decay)
    on_device = any(isinstance(number, Tensor) and number.device.type != "cpu" for number in numbers)
    if not group.get("fused") or group["amsgrad"] or group["differentiable"] or on_device:
        return None
    decoupled, maximize = group["decoupled_weight_decay"], group["maximize"]
    return AdamWSettings(float(lr), float(beta1), float(beta2), float(eps), float(weight_decay), decoupled, maximize)


def _tensors(optimizer: Optimizer, parameter: nn.Parameter) -> tuple[AdamWTensors, Tensor | None] | None:
    """What the kernel needs of ``parameter``, and the factor of its gradient; None where the optimizer is to step."""
    if not isinstance(parameter, SplitParameter):
        return None
    gradient, factor = gradient_and_factor(parameter)
    # a sparse gradient is refused by the optimizer itself; fake ones are those of an estimate of memory
    if gradient is None or type(gradient) is not Tensor or gradient.is_sparse or gradient.shape != parameter.shape:
        return None
    halves = halves_of(parameter)
    if halves is None or type(halves.working) is not Tensor or gradient.device != halves.working.device:
        return None
    state = optimizer.state[parameter]
    if not state:
        state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
        for name in ("exp_avg", "exp_avg_sq"):
            state[name] = torch.zeros(parameter.shape, dtype=torch.float32, device=parameter.device)
    moments = [state["exp_avg"], state["exp_avg_sq"]]
    if not all(m.dtype is torch.float32 and m.device == gradient.device and m.is_contiguous() for m in moments):
        return None
    tensors = AdamWTensors(
        gradient, moments[0], moments[1], state["step"], working=halves.working, remainder=halves.remainder
    )
    return tensors, factor
