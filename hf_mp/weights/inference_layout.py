"""Layouts of models that are read and not trained: in an evaluation, and as the reference of a policy model."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from hf_mp.dtypes import LOWER_PRECISION_DTYPES
from hf_mp.kernels.split import split
from hf_mp.policy import PrecisionPolicy
from hf_mp.ranks.parallelism import is_dtensor
from hf_mp.weights.layout import WeightLayout
from hf_mp.weights.split_layout import trained_with_statistics


class InferenceLayout(WeightLayout):
    """Gives, at equal weights, the values of a model that is trained under ``policy``, without its masters.

    Default layout: 16-bit weights of products stay as they are; others are FP32 until :meth:`restore`, so that what
    they are added to is FP32. Lean layouts: weights are their working copies until :meth:`restore`, buffers FP32.

    Args:
        policy: whose values to give.
        only_trainable: whether a lean layout leaves frozen weights in FP32, as in a model that is trained.
    """

    def __init__(self, policy: PrecisionPolicy, *, only_trainable: bool = True) -> None:
        super().__init__(policy)
        self._only_trainable = only_trainable
        # Each changed tensor and its own dtype; if it was rounded, also its own values and the version of the rounding.
        self._changed: list[tuple[Tensor, torch.dtype, Tensor | None, int]] = []

    @torch.no_grad()
    def prepare_weights(self, model: nn.Module) -> None:
        is_lean = self.policy.params is not torch.float32
        for tensor in model.buffers() if is_lean else _outside_of_products(model):
            if tensor.dtype in LOWER_PRECISION_DTYPES and not is_dtensor(tensor):
                self._changed.append((tensor, tensor.dtype, None, 0))
                tensor.data = tensor.data.float()
        if is_lean:
            self._round_parameters(model)

    def _round_parameters(self, model: nn.Module) -> None:
        """Round the weights of ``model`` to their working copies, and note their own values."""
        with_statistics = trained_with_statistics(model)
        others = {torch.float32, *LOWER_PRECISION_DTYPES} - {self.policy.params}
        for parameter in model.parameters():
            # BatchNorm's weights stay FP32 in a lean layout, next to its statistics.
            is_left = parameter in with_statistics or (self._only_trainable and not parameter.requires_grad)
            if parameter.dtype in others and not is_left and not is_dtensor(parameter):
                own, parameter.data = parameter.data, split(parameter.data.float(), self.policy.params).working
                self._changed.append((parameter, own.dtype, own, parameter._version))

    def restore(self, model: nn.Module | None) -> None:
        for tensor, dtype, own, version in self._changed:
            # What was written meanwhile (a reference that follows its policy) wins.
            tensor.data = tensor.data.to(dtype) if own is None or tensor._version != version else own
        self._changed.clear()
        super().restore(model)


def _outside_of_products(model: nn.Module) -> Iterator[Tensor]:
    """The buffers of ``model``, and the parameters that no product reads."""
    for module in model.modules():
        multiplies = not isinstance(module, (nn.Embedding, nn.EmbeddingBag))
        for name, parameter in module._parameters.items():
            if parameter is not None and not (multiplies and name == "weight" and parameter.dim() > 1):
                yield parameter
        yield from (buffer for buffer in module._buffers.values() if buffer is not None)
