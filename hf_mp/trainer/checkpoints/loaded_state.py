"""Whether a loaded state fits the run: the model's tensors, finite weights and moments, plausible counters.

Everything here raises a CheckpointError that names what does not fit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor, nn
from torch.optim import Optimizer

from hf_mp.kernels.gradient_scan import all_finite
from hf_mp.trainer.checkpoints.manifest import CheckpointError
from hf_mp.weights.ranks.placement import local_part

_MOST_CHARACTERS = 2000  # of a library's message, which may quote the state
_FLOATING = ("F", "BF")  # how safetensors' names of floating dtypes begin
# Rates and counters, in an optimizer's groups and in schedulers: finite, and none below 0.
_RATES = ("lr", "initial_lr", "base_lrs", "_last_lr", "betas", "momentum", "eps", "weight_decay")
_NUMBERS = {*_RATES, "step", "last_epoch", "_step_count"}
# State that has an element for each of its parameter; other optimizers' factors have not.
_LIKE_PARAMETER = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg")


@contextmanager
def naming(checkpoint: str | Path, what: str) -> Iterator[None]:
    """Turn the error of a library that cannot load a state into a CheckpointError that names the checkpoint."""
    try:
        yield
    except CheckpointError:
        raise
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RuntimeError, AssertionError) as error:
        raise CheckpointError(
            f"{what} of {checkpoint} does not fit this run: {str(error)[:_MOST_CHARACTERS]}. Resume with the model, "
            "the optimizer and the settings that it was saved with"
        ) from error


def check_weights_file(path: Path, model: nn.Module) -> None:
    """Raise if ``model.safetensors`` is another model's: no name in common, or integers for floating tensors."""
    expected = model.state_dict()
    with safe_open(path, "pt") as file:
        names = set(file.keys())
        common = names & expected.keys()
        if names and expected and not common:
            raise CheckpointError(
                f"{path} has no tensor of this {type(model).__name__}: it has {str(sorted(names)[:3])[1:-1]:.300}, "
                f"sought are {str(sorted(expected)[:3])[1:-1]}: load it into the model that was saved"
            )
        for name in sorted(common):
            dtype = file.get_slice(name).get_dtype()
            if expected[name].is_floating_point() != dtype.startswith(_FLOATING):
                raise CheckpointError(
                    f"{path}: {name} is {dtype}, and {expected[name].dtype} here: load it into the model that was saved"
                )


def check_parameters(checkpoint: str | Path, model: nn.Module) -> None:
    """Raise where a floating parameter that was loaded is inf or NaN."""
    for name, parameter in model.named_parameters():
        if not _is_finite(parameter):
            raise CheckpointError(f"{checkpoint}: the weight {name} holds inf or NaN: take an earlier checkpoint")


def check_optimizer(checkpoint: str | Path, optimizer: Optimizer) -> None:
    """Raise where an optimizer's state that was loaded cannot be one: inf, NaN, negative steps, other shapes."""
    for number, group in enumerate(optimizer.param_groups):
        if wrong := _wrong_number({key: value for key, value in group.items() if key != "params"}):
            raise CheckpointError(
                f"{checkpoint}: the optimizer's group {number} says {wrong}: take an earlier checkpoint"
            )
    for parameter, state in optimizer.state.items():
        if not isinstance(parameter, Tensor) or not isinstance(state, Mapping):
            continue
        for name, value in state.items():
            if wrong := _wrong_entry(name, value, parameter):
                raise CheckpointError(
                    f"{checkpoint}: the optimizer's {name} of a parameter of shape {tuple(parameter.shape)} {wrong}: "
                    "take an earlier checkpoint"
                )


def _wrong_entry(name: str, value: Any, parameter: Tensor) -> str | None:
    if not isinstance(value, Tensor):
        return f"is {value}" if _wrong_number({name: value}) else None
    if name in _LIKE_PARAMETER and value.shape != parameter.shape:
        return f"has shape {tuple(value.shape)}"
    if name in _LIKE_PARAMETER and parameter.is_floating_point() and value.dtype.is_complex:
        return f"is {value.dtype}"
    if not _is_finite(value):
        return "holds inf or NaN"
    return f"is {value.item()}" if name == "step" and value.numel() == 1 and value.item() < 0 else None


def _is_finite(tensor: Tensor) -> bool:
    parts = [part for part in _plain_parts(local_part(tensor)) if part.is_floating_point()]
    return all_finite([part.float() if part.itemsize == 1 else part for part in parts])  # FP8 has no minimum in torch


def _plain_parts(tensor: Any) -> Iterator[Tensor]:
    """What a tensor that is stored in fewer bits (torchao's states) consists of."""
    if not hasattr(tensor, "__tensor_flatten__"):
        yield tensor
        return
    for name in tensor.__tensor_flatten__()[0]:
        yield from _plain_parts(getattr(tensor, name))


def check_scheduler(checkpoint: str | Path, scheduler: Any, known: Iterable[str]) -> None:
    """Raise where an LR scheduler took over what no scheduler of its kind saves."""
    state = scheduler.state_dict()
    if unknown := sorted(set(state) - set(known)):
        raise CheckpointError(
            f"{checkpoint}: scheduler.pt has {unknown[0][:100]!r}, which this scheduler has not: resume with the "
            "lr_scheduler_type that was saved"
        )
    if wrong := _wrong_number(state):
        raise CheckpointError(f"{checkpoint}: scheduler.pt says {wrong}: take an earlier checkpoint")


def _wrong_number(values: Mapping[str, Any]) -> str | None:
    """The first rate or counter, also in a list, that is inf, NaN or negative."""
    for name in values.keys() & _NUMBERS:
        value = values[name]
        for each in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(each, Tensor) and each.numel() == 1:
                each = each.item()
            if isinstance(each, (int, float)) and not 0 <= each < math.inf:
                return f"{name}={each}"
    return None
