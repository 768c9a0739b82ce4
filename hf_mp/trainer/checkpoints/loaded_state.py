"""Whether a loaded state fits the run: the model's tensors, finite weights and moments.

Everything here raises a CheckpointError that names what does not fit.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Adagrad, Optimizer
from transformers.utils import logging

from hf_mp.kernels.gradient_scan import all_finite
from hf_mp.ranks.parallelism import local_part
from hf_mp.trainer.checkpoints.manifest import CheckpointError

logger = logging.get_logger(__name__)

_MOST_CHARACTERS = 300  # of a line of a library's message, which may quote the state
# State that has an element for each of its parameter; other optimizers' factors have not.
_LIKE_PARAMETER = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg")
# Means of squares and of absolute values: of torch's optimizers, of Transformers' Adafactor, of bitsandbytes.
_NOT_NEGATIVE = {
    *("exp_avg_sq", "max_exp_avg_sq", "square_avg", "acc_delta", "exp_inf", "row_var", "col_var", "variance"),
    *("exp_avg_sq_row", "exp_avg_sq_col", "RMS", "absmax1", "absmax2", "step"),
}
# Settings of optimizers and schedules, by name.
_DECAYS = {"betas", "beta1", "beta2"}
_RATES = {"lr", "initial_lr", "base_lrs", "_last_lr"}
_FROM_ZERO = _DECAYS | _RATES | {"eps", "weight_decay", "momentum", "last_epoch", "_step_count", "T_max", "step"}
_OF_FIXED_LENGTH = {"betas", "base_lrs"}


@contextmanager
def as_checkpoint_error(checkpoint: str | Path, what: str) -> Iterator[None]:
    """Turn the error of a library that cannot load a state into a CheckpointError that names the checkpoint."""
    try:
        yield
    except (CheckpointError, OSError, ImportError, MemoryError):  # which are not of what was saved
        raise
    except Exception as error:  # any error of torch, accelerate or safetensors: state that does not fit or is damaged
        raise CheckpointError(
            f"{what} of {checkpoint} does not fit this run: {_in_short(error)}. Resume with the model, the optimizer "
            "and the settings that it was saved with"
        ) from error


def _in_short(error: Exception) -> str:
    """The message of ``error``, of which a list of all that does not fit is cut to its first line and a number."""
    lines = [line.strip()[:_MOST_CHARACTERS].rstrip(".") for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    more = f", and {len(lines) - 2} more" if len(lines) > 2 else ""
    return f"{' '.join(lines[:2])}{more}"


def check_parameters(checkpoint: str | Path, model: nn.Module) -> None:
    """Raise where a floating parameter that was loaded is inf or NaN."""
    for name, parameter in model.named_parameters():
        if not _is_finite(parameter):
            raise CheckpointError(f"{checkpoint}: the weight {name} holds inf or NaN: take an earlier checkpoint")


@contextmanager
def checking(checkpoint: str | Path, optimizer: Any, schedule: Any = None) -> Iterator[None]:
    """Check the state that is loaded into an optimizer and a schedule within this context.

    Raises:
        CheckpointError: at its end, for state that does not fit or would ruin the run; as :func:`check_optimizer`.
    """
    before = {} if schedule is None else dict(schedule.state_dict())
    with as_checkpoint_error(checkpoint, "the state of the optimizer or the scheduler"):
        with _checking_types(checkpoint, optimizer):
            yield
        if schedule is not None:
            _check_settings(checkpoint, "the scheduler", schedule.state_dict(), before)
        if optimizer is not None:
            check_optimizer(checkpoint, optimizer)


@contextmanager
def _checking_types(checkpoint: str | Path, optimizer: Any) -> Iterator[None]:
    """Context in which state of a wrong type raises, before torch casts it to the dtype of its parameter."""

    def check(_: Any, state_dict: Mapping[str, Any]) -> None:
        for entry in state_dict["state"].values():
            for name, value in entry.items():
                if wrong := _wrong_type(name, value):
                    raise CheckpointError(f"{checkpoint}: the optimizer's {name} {wrong}: take an earlier checkpoint")

    inner = innermost(optimizer)
    # Optimizers that do not call torch's constructor have no hooks.
    has_hooks = hasattr(inner, "_optimizer_load_state_dict_pre_hooks")
    handle = inner.register_load_state_dict_pre_hook(check) if has_hooks else None
    try:
        yield
    finally:
        if handle is not None:
            handle.remove()


def innermost(optimizer: Any) -> Any:
    """The optimizer in the wrappers of accelerate and of master weights."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = inner
    return optimizer


def check_optimizer(checkpoint: str | Path, optimizer: Any) -> None:
    """Check the settings and the state that an optimizer has loaded.

    Raises:
        CheckpointError: for settings and state of another type or shape, inf, NaN, a negative step or second moment,
            a decay of 1, and state of which a part is missing.
    """
    for group in optimizer.param_groups:
        _check_settings(checkpoint, "the optimizer", group, getattr(optimizer, "defaults", {}))
    not_negative = _NOT_NEGATIVE | ({"sum"} if isinstance(innermost(optimizer), Adagrad) else set())
    for parameter, state in optimizer.state.items():
        if not isinstance(parameter, Tensor) or not isinstance(state, Mapping):
            continue
        for name, value in state.items():
            if wrong := _wrong_entry(name, value, parameter, not_negative):
                raise CheckpointError(
                    f"{checkpoint}: the optimizer's {name} of a parameter of shape {tuple(parameter.shape)} {wrong}: "
                    "take an earlier checkpoint"
                )
    _check_that_state_is_there(checkpoint, optimizer)


def _wrong_entry(name: str, value: Any, parameter: Tensor, not_negative: AbstractSet[str]) -> str | None:
    """What is wrong with an entry of the state of ``parameter``; None if nothing is."""
    if wrong := _wrong_type(name, value):
        return wrong
    if name in _LIKE_PARAMETER and value is not None and value.shape != parameter.shape:
        return f"has shape {tuple(value.shape)}"
    if isinstance(value, float) and not math.isfinite(value):
        return f"is {value}"
    if isinstance(value, Tensor) and not _is_finite(value):
        return "holds inf or NaN"
    return "is negative" if name in not_negative and _has_negative(value) else None


def _wrong_type(name: str, value: Any) -> str | None:
    if name == "step":
        return None if _is_number(value) else f"is {value!r:.100}, not a number"
    # torch.optim.SGD has a buffer that is None before its first use.
    if name not in _LIKE_PARAMETER or (value is None and name == "momentum_buffer"):
        return None
    if not isinstance(value, Tensor):
        return f"is {value!r:.100}, not a tensor"
    return None if value.is_floating_point() or value.is_complex() else f"holds {value.dtype}"


def _check_that_state_is_there(checkpoint: str | Path, optimizer: Any) -> None:
    """Raise for a parameter of which torch's optimizer has only a part of the state; warn of one without any.

    That one may have had no gradient yet, such as an expert that no token was sent to.
    """
    if not type(innermost(optimizer)).__module__.startswith("torch.optim"):
        return
    without: list[tuple[int, ...]] = []
    trained = 0
    for group in optimizer.param_groups:
        entries = [(p, optimizer.state.get(p) or {}) for p in group["params"] if p.requires_grad]
        # Factored state is of parameters with as many dimensions.
        names: dict[int, set[str]] = {}
        for parameter, entry in entries:
            names.setdefault(parameter.dim(), set()).update(entry)
        for parameter, entry in entries:
            if entry and (missing := sorted(names[parameter.dim()] - entry.keys())):
                raise CheckpointError(
                    f"{checkpoint}: a parameter of shape {tuple(parameter.shape)} has no {missing[0]} in the "
                    "optimizer's state, and others have: take an earlier checkpoint"
                )
        without += [tuple(parameter.shape) for parameter, entry in entries if not entry]
        trained += len(entries)
    if 0 < len(without) < trained:
        logger.warning(
            f"{checkpoint} has no state of the optimizer for {len(without)} of {trained} parameters, one of shape "
            f"{without[0]}: they had no gradient yet, or it is missing; theirs starts anew"
        )


def _check_settings(checkpoint: str | Path, what: str, loaded: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Raise a CheckpointError for loaded settings that this run's ``own`` settings of the same names do not allow."""
    for name in sorted(own.keys() | (_FROM_ZERO & loaded.keys())):
        wrong = None
        if name in loaded:
            wrong = wrong_setting(name, loaded[name], own.get(name))
        elif name in _FROM_ZERO:  # other settings come and go with versions of torch
            wrong = "is missing"
        if wrong:
            raise CheckpointError(f"{checkpoint}: {what}'s {name} {wrong}: take an earlier checkpoint")
        if name == "_schedulers":  # of a schedule that is made of others
            for part, own_part in zip(loaded[name], own[name], strict=False):
                _check_settings(checkpoint, what, part, own_part)


def wrong_setting(name: str, value: Any, own: Any) -> str | None:
    """What is wrong with a setting that was loaded, next to this run's ``own`` value of it; None if nothing is."""
    found, expected = _numbers_in(value), _numbers_in(own)
    if isinstance(own, bool):
        return None if value is None or isinstance(value, bool) else f"is {value!r:.100}, neither True nor False"
    must_be_numbers = bool(expected) or (name in _FROM_ZERO and value is not None)
    is_sequence = isinstance(value, (list, tuple))
    if must_be_numbers and (found is None or (expected and is_sequence != isinstance(own, (list, tuple)))):
        return f"is {value!r:.100}, not {'numbers' if isinstance(own, (list, tuple)) else 'a number'}"
    if expected and name in _OF_FIXED_LENGTH and len(found or []) != len(expected):
        return f"has {len(found or [])} numbers, not {len(expected)}"
    # A schedule's best loss is inf before there is one.
    may_be_infinite = name not in _FROM_ZERO and not all(map(math.isfinite, expected or []))
    for number in found or []:
        if not (math.isfinite(number) or may_be_infinite):
            return f"is {value!r:.100}"
        if name in _FROM_ZERO and number < 0:
            return f"is {value!r:.100}, and must not be negative"
        if name in _DECAYS and number >= 1:
            return f"is {value!r:.100}, and must be below 1"
    return None


def _numbers_in(value: Any) -> list[float] | None:
    """A number, or those of a sequence without its None; None if there is anything else."""
    parts = [one for one in value if one is not None] if isinstance(value, (list, tuple)) else [value]
    return [float(one) for one in parts] if all(map(_is_number, parts)) else None


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.is_complex()
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _has_negative(value: Any) -> bool:
    if not isinstance(value, Tensor):
        return _is_number(value) and value < 0
    part = local_part(value)
    if hasattr(part, "__tensor_flatten__") or part.is_complex() or not part.numel():
        return False
    return bool((part.float() if part.itemsize == 1 else part).min() < 0)


def _is_finite(tensor: Tensor) -> bool:
    part = local_part(tensor)
    # State that is stored in fewer bits (torchao's) is a subclass that all_finite cannot read.
    if not part.is_floating_point() or hasattr(part, "__tensor_flatten__"):
        return True
    return all_finite([part.float() if part.itemsize == 1 else part])  # FP8 has no minimum in torch
