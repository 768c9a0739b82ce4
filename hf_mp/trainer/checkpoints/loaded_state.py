"""Check loaded weights, optimizer and scheduler state. Each CheckpointError names the value."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Adagrad, Optimizer
from transformers.utils import logging

from hf_mp.kernels.gradient_scan import all_finite
from hf_mp.ranks.parallelism import local_part
from hf_mp.trainer.checkpoints.manifest import CheckpointError

logger = logging.get_logger(__name__)

_MAX_LINE_CHARACTERS = 300  # messages of other libraries may quote the state
_LIKE_PARAMETER = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg")
# Steps, and means of squares or absolute values.
_NOT_NEGATIVE = {
    *("exp_avg_sq", "max_exp_avg_sq", "square_avg", "acc_delta", "exp_inf", "row_var", "col_var", "variance"),
    *("exp_avg_sq_row", "exp_avg_sq_col", "RMS", "absmax1", "absmax2", "step"),
}

_DECAYS = {"betas", "beta1", "beta2"}
_RATES = {"lr", "initial_lr", "base_lrs", "_last_lr"}
_FROM_ZERO = _DECAYS | _RATES | {"eps", "weight_decay", "momentum", "last_epoch", "_step_count", "T_max", "step"}
_OF_FIXED_LENGTH = {"betas", "base_lrs"}


@contextmanager
def as_checkpoint_error(checkpoint: str | Path, what: str) -> Iterator[None]:
    """Convert errors of other libraries in this context to a CheckpointError about ``what``."""
    try:
        yield
    except (CheckpointError, OSError, ImportError, MemoryError):  # not caused by the saved values
        raise
    except Exception as error:
        raise CheckpointError(
            f"{what} of {checkpoint} does not fit this run: {_shorten(error)}. Resume with the model, the optimizer "
            "and the settings that it was saved with"
        ) from error


def _shorten(error: Exception) -> str:
    lines = [line.strip()[:_MAX_LINE_CHARACTERS].rstrip(".") for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    more = f", and {len(lines) - 2} more" if len(lines) > 2 else ""
    return f"{' '.join(lines[:2])}{more}"


def check_parameters(checkpoint: str | Path, model: nn.Module) -> None:
    """Raise a CheckpointError for inf and NaN."""
    for name, parameter in model.named_parameters():
        if not _is_finite(parameter):
            raise CheckpointError(f"{checkpoint}: the weight {name} holds inf or NaN: take an earlier checkpoint")


@contextmanager
def checking(checkpoint: str | Path, optimizer: Any, schedule: Any = None) -> Iterator[None]:
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
    """Check types before torch casts the state to the dtype of its parameter."""

    def check(_: Any, state_dict: Mapping[str, Any]) -> None:
        for entry in state_dict["state"].values():
            for name, value in entry.items():
                if wrong := _wrong_type(name, value):
                    raise CheckpointError(f"{checkpoint}: the optimizer's {name} {wrong}: take an earlier checkpoint")

    inner = innermost(optimizer)
    with ExitStack() as at_end:
        # Optimizers that do not call Optimizer.__init__ have no hooks.
        if hasattr(inner, "_optimizer_load_state_dict_pre_hooks"):
            at_end.callback(inner.register_load_state_dict_pre_hook(check).remove)
        yield


def innermost(optimizer: Any) -> Any:
    while isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = inner
    return optimizer


def check_optimizer(checkpoint: str | Path, optimizer: Any) -> None:
    """Check settings and state: types, shapes, inf, NaN, signs, and missing parts."""
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
    _check_state_present(checkpoint, optimizer)


# _wrong_...() return a description of the error, or None.


def _wrong_entry(name: str, value: Any, parameter: Tensor, not_negative: AbstractSet[str]) -> str | None:
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
    is_unset = value is None and name == "momentum_buffer"  # as torch.optim.SGD initializes it
    if name not in _LIKE_PARAMETER or is_unset:
        return None
    if not isinstance(value, Tensor):
        return f"is {value!r:.100}, not a tensor"
    return None if value.is_floating_point() or value.is_complex() else f"holds {value.dtype}"


def _check_state_present(checkpoint: str | Path, optimizer: Any) -> None:
    """Raise if a parameter lacks a part of its state; warn if it lacks all, as an expert without tokens."""
    if not type(innermost(optimizer)).__module__.startswith("torch.optim"):
        return
    without: list[tuple[int, ...]] = []
    trained = 0
    for group in optimizer.param_groups:
        entries = [(p, optimizer.state.get(p) or {}) for p in group["params"] if p.requires_grad]
        _check_equal_keys(checkpoint, entries)
        without += [tuple(parameter.shape) for parameter, entry in entries if not entry]
        trained += len(entries)
    if 0 < len(without) < trained:
        logger.warning(
            f"{checkpoint} has no state of the optimizer for {len(without)} of {trained} parameters, one of shape "
            f"{without[0]}: they had no gradient yet, or it is missing; theirs starts anew"
        )


def _check_equal_keys(checkpoint: str | Path, entries: Sequence[tuple[Tensor, Mapping[str, Any]]]) -> None:
    # The keys depend on the number of dimensions: Adafactor factors the state of matrices.
    keys_by_dim: dict[int, set[str]] = {}
    for parameter, entry in entries:
        keys_by_dim.setdefault(parameter.dim(), set()).update(entry)
    for parameter, entry in entries:
        missing = sorted(keys_by_dim[parameter.dim()] - entry.keys())
        if entry and missing:
            raise CheckpointError(
                f"{checkpoint}: a parameter of shape {tuple(parameter.shape)} has no {missing[0]} in the "
                "optimizer's state, and others have: take an earlier checkpoint"
            )


def _check_settings(checkpoint: str | Path, what: str, loaded: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    for name in sorted(own.keys() | (_FROM_ZERO & loaded.keys())):
        if name in loaded:
            wrong = wrong_setting(name, loaded[name], own.get(name))
        else:  # missing settings outside of _FROM_ZERO depend on the version of torch
            wrong = "is missing" if name in _FROM_ZERO else None
        if wrong:
            raise CheckpointError(f"{checkpoint}: {what}'s {name} {wrong}: take an earlier checkpoint")
        if name == "_schedulers":  # of SequentialLR and ChainedScheduler
            for part, own_part in zip(loaded[name], own[name], strict=False):
                _check_settings(checkpoint, what, part, own_part)


def wrong_setting(name: str, value: Any, own: Any) -> str | None:
    """Compare a loaded setting with the ``own`` value of this run; describe the error, or return None."""
    if isinstance(own, bool):
        return None if value is None or isinstance(value, bool) else f"is {value!r:.100}, neither True nor False"
    found, expected = _numbers_in(value), _numbers_in(own) or []
    must_be_numbers = bool(expected) or (name in _FROM_ZERO and value is not None)
    if found is None and not must_be_numbers:
        return None
    own_is_sequence = isinstance(own, (list, tuple))
    has_other_form = bool(expected) and isinstance(value, (list, tuple)) != own_is_sequence
    if found is None or has_other_form:
        return f"is {value!r:.100}, not {'numbers' if own_is_sequence else 'a number'}"
    if expected and name in _OF_FIXED_LENGTH and len(found) != len(expected):
        return f"has {len(found)} numbers, not {len(expected)}"
    # The best loss of ReduceLROnPlateau is inf at first.
    may_be_infinite = name not in _FROM_ZERO and not all(map(math.isfinite, expected))
    for number in found:
        if not (math.isfinite(number) or may_be_infinite):
            return f"is {value!r:.100}"
        if name in _FROM_ZERO and number < 0:
            return f"is {value!r:.100}, and must not be negative"
        if name in _DECAYS and number >= 1:
            return f"is {value!r:.100}, and must be below 1"
    return None


def _numbers_in(value: Any) -> list[float] | None:
    """Return the numbers in a number or a sequence, without None; None for other values."""
    parts = [part for part in value if part is not None] if isinstance(value, (list, tuple)) else [value]
    return [float(part) for part in parts] if all(map(_is_number, parts)) else None


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
    # all_finite() does not support torchao's subclasses.
    if not part.is_floating_point() or hasattr(part, "__tensor_flatten__"):
        return True
    return all_finite([part.float() if part.itemsize == 1 else part])  # torch has no min() for FP8
