"""The batches that a diagnosis runs: checked, and given to the model as a loop would."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from hf_mp.kernels.nested import named_tensors


def checked(batches: Any) -> list[Any]:
    """Return ``batches`` as a list; a mapping or a tensor is one batch. Raises ValueError if there is none."""
    is_one = isinstance(batches, Tensor) or (isinstance(batches, Mapping) and len(batches) > 0)
    if not (given := [batches] if is_one else list(batches)):
        raise ValueError("batches is empty: give at least one, such as [next(iter(loader))]")
    return given


def call(model: nn.Module, batch: Any) -> Any:
    """What ``model`` returns for a mapping of arguments, a tuple or list of them, or one argument."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, (tuple, list)) else model(batch)


def loss_of(outputs: Any) -> Tensor | None:
    """The loss that a model returned: of the scalars with a gradient the one of this name, else the first."""
    scalars = {name: tensor for name, tensor in named_tensors(outputs) if tensor.numel() == 1 and tensor.requires_grad}
    return scalars.get("loss", next(iter(scalars.values()), None))
