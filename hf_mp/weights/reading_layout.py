"""Layouts of models that are read and not trained: in an evaluation, and as the reference of a policy model."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from hf_mp.policy import LOWER_PRECISION_DTYPES, PrecisionPolicy
from hf_mp.weights.distributed import is_dtensor
from hf_mp.weights.layout import SplitLayout, WeightLayout


class ReadingLayout(WeightLayout):
    """Gives the values of the default layout without its masters: 16-bit weights of products stay as they are.

    Others become FP32 until :meth:`restore`, so that what they are added to is FP32, as in a model that is trained.
    """

    def __init__(self, policy: PrecisionPolicy) -> None:
        super().__init__(policy)
        self._widened: list[tuple[Tensor, torch.dtype]] = []

    @torch.no_grad()
    def prepare(self, model: nn.Module) -> None:
        for tensor in _outside_of_products(model):
            if tensor.dtype in LOWER_PRECISION_DTYPES and not is_dtensor(tensor):
                self._widened.append((tensor, tensor.dtype))
                tensor.data = tensor.data.float()

    def restore(self, model: nn.Module | None) -> None:
        for tensor, dtype in self._widened:
            tensor.data = tensor.data.to(dtype)
        self._widened.clear()
        super().restore(model)


class _SplitReadingLayout(SplitLayout):
    """Rounds FP32 weights as :class:`SplitLayout` does, frozen ones too; 16-bit ones are its working copies already."""

    def prepare(self, model: nn.Module) -> None:
        floating = [parameter for parameter in model.parameters() if parameter.is_floating_point()]
        were_trained = [parameter.requires_grad for parameter in floating]
        for parameter in floating:
            parameter.requires_grad_(parameter.dtype is torch.float32)
        super().prepare(model)
        for parameter, was_trained in zip(floating, were_trained, strict=True):
            parameter.requires_grad_(was_trained)


def make_reference_layout(policy: PrecisionPolicy) -> WeightLayout:
    """The layout in which a reference gives, at equal weights, what a model trained under ``policy`` gives."""
    return ReadingLayout(policy) if policy.params is torch.float32 else _SplitReadingLayout(policy)


def _outside_of_products(model: nn.Module) -> Iterator[Tensor]:
    for module in model.modules():
        multiplies = not isinstance(module, (nn.Embedding, nn.EmbeddingBag))
        for name, parameter in module._parameters.items():
            if parameter is not None and not (multiplies and name == "weight" and parameter.dim() > 1):
                yield parameter
        yield from (buffer for buffer in module._buffers.values() if buffer is not None)
