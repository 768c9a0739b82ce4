"""A stand-in for the states of torchao's optimizers."""

from __future__ import annotations

from typing import Any

import torch


class EightBits(torch.Tensor):
    """Looks like an FP32 tensor of shape (2, 3) and holds codes and a scale; no op takes it."""

    codes: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls, scale: float) -> EightBits:
        made: EightBits = torch.Tensor._make_wrapper_subclass(cls, (2, 3), dtype=torch.float32)  # type: ignore[attr-defined]
        made.codes, made.scale = torch.zeros(2, 3, dtype=torch.uint8), torch.tensor([scale])
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scale"], None

    @classmethod
    def __torch_dispatch__(cls, function: Any, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(function)
