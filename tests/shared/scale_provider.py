"""Scaled backwards without a model, for tests of the scale boundary."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class ScaleProvider:
    """Scales every backward by ``value``, and records the sums of the gradients of outputs in ``entering``."""

    def __init__(self, value: float = 2.0**20) -> None:
        self.value = torch.tensor([value])
        self.entering: list[float] = []

    def loss_scale_for(self, device: torch.device) -> Tensor:
        return self.value

    def inverse_scale_for(self, device: torch.device, node: Any, indices: Sequence[int]) -> Tensor:
        return 1.0 / self.value

    def on_output_gradient(self, node: Any, gradient: Tensor) -> None:
        self.entering.append(gradient.sum().item())

    def take_scaled_gradients(self, node: Any, gradients: dict[int, list[Tensor]], inverse: Tensor | None) -> None:
        pass
