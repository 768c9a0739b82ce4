"""Batches of a diagnosis."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from hf_mp.kernels.nested import named_tensors


def check_batches(batches: Any) -> list[Any]:
    """Return ``batches`` as a list; a mapping or a tensor is one batch."""
    is_one = isinstance(batches, Tensor) or (isinstance(batches, Mapping) and len(batches) > 0)
    given = [batches] if is_one else list(batches)
    if not given:
        raise ValueError("batches is empty: give at least one, such as [next(iter(loader))]")
    return given


def call_model(model: nn.Module, batch: Any) -> Any:
    """Call ``model`` with a mapping, tuple or list of arguments, or a single one."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, (tuple, list)) else model(batch)


def find_loss(outputs: Any) -> Tensor | None:
    """Return the scalar output ``loss`` that requires grad, else the first such one, or None."""
    scalars = {name: tensor for name, tensor in named_tensors(outputs) if tensor.numel() == 1 and tensor.requires_grad}
    return scalars.get("loss", next(iter(scalars.values()), None))
