"""Whether a loaded state fits the run: the model's tensors, finite weights and moments.

Everything here raises a CheckpointError that names what does not fit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from safetensors import safe_open
from torch import Tensor, nn
from torch.optim import Optimizer

from hf_mp.kernels.gradient_scan import all_finite
from hf_mp.ranks.parallelism import local_part
from hf_mp.trainer.checkpoints.manifest import CheckpointError

_MOST_CHARACTERS = 2000  # of a library's message, which may quote the state
# State that has an element for each of its parameter; other optimizers' factors have not.
_LIKE_PARAMETER = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg")


@contextmanager
def naming(checkpoint: str | Path, what: str) -> Iterator[None]:
    """Turn the error of a library that cannot load a state into a CheckpointError that names the checkpoint."""
    try:
        yield
    except (CheckpointError, OSError, ImportError, MemoryError):  # which are not of what was saved
        raise
    except Exception as error:  # any error of torch, accelerate or safetensors: state that does not fit or is damaged
        raise CheckpointError(
            f"{what} of {checkpoint} does not fit this run: {str(error)[:_MOST_CHARACTERS]}. Resume with the model, "
            "the optimizer and the settings that it was saved with"
        ) from error


def check_weights_file(path: Path, model: nn.Module) -> None:
    """Raise if ``model.safetensors`` is another model's: no name in common, which the Trainer takes with a warning."""
    with safe_open(path, "pt") as file:
        names = set(file.keys())
    named = {name for name, _ in (*model.named_parameters(), *model.named_buffers())}
    # The state dict last: that of a lean model has FP32 weights, which are made for it.
    expected = named if names & named else model.state_dict().keys()
    if names and expected and not names & expected:
        raise CheckpointError(
            f"{path} has no tensor of this {type(model).__name__}: it has {str(sorted(names)[:3])[1:-1]:.300}, "
            f"the model has {str(sorted(expected)[:3])[1:-1]}: load it into the model that was saved"
        )


def check_parameters(checkpoint: str | Path, model: nn.Module) -> None:
    """Raise where a floating parameter that was loaded is inf or NaN."""
    for name, parameter in model.named_parameters():
        if not _is_finite(parameter):
            raise CheckpointError(f"{checkpoint}: the weight {name} holds inf or NaN: take an earlier checkpoint")


def check_optimizer(checkpoint: str | Path, optimizer: Optimizer) -> None:
    """Raise where an optimizer's state that was loaded cannot be one: inf, NaN, other shapes."""
    for parameter, state in optimizer.state.items():
        if not isinstance(parameter, Tensor) or not isinstance(state, Mapping):
            continue
        for name, value in state.items():
            if isinstance(value, Tensor) and (wrong := _wrong_entry(name, value, parameter)):
                raise CheckpointError(
                    f"{checkpoint}: the optimizer's {name} of a parameter of shape {tuple(parameter.shape)} {wrong}: "
                    "take an earlier checkpoint"
                )


def _wrong_entry(name: str, value: Tensor, parameter: Tensor) -> str | None:
    if name in _LIKE_PARAMETER and value.shape != parameter.shape:
        return f"has shape {tuple(value.shape)}"
    return None if _is_finite(value) else "holds inf or NaN"


def _is_finite(tensor: Tensor) -> bool:
    part = local_part(tensor)
    # State that is stored in fewer bits (torchao's) is a subclass that all_finite cannot read.
    if not part.is_floating_point() or hasattr(part, "__tensor_flatten__"):
        return True
    return all_finite([part.float() if part.itemsize == 1 else part])  # FP8 has no minimum in torch
