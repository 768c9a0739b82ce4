"""``InferenceLayout``, for models that are not trained."""

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
    """Computes the values of a model that is trained under ``policy``, for equal weights, without FP32 masters.

    In a default layout, 16-bit weights of matmuls are unchanged, and others are FP32. In a lean layout, weights are
    rounded to working copies, and buffers are FP32. :meth:`restore` undoes both.

    Args:
        policy: of the training.
        only_trainable: whether a lean layout leaves frozen weights in FP32, as in a model that is trained.
    """

    def __init__(self, policy: PrecisionPolicy, *, only_trainable: bool = True) -> None:
        super().__init__(policy)
        self._only_trainable = only_trainable
        self._widened: list[tuple[Tensor, torch.dtype]] = []  # with their dtype before
        self._rounded: list[tuple[Tensor, Tensor, int]] = []  # with their value before and their version after

    @torch.no_grad()
    def prepare_weights(self, model: nn.Module) -> None:
        is_lean = self.policy.params is not torch.float32
        for tensor in model.buffers() if is_lean else _tensors_not_multiplied(model):
            if tensor.dtype in LOWER_PRECISION_DTYPES and not is_dtensor(tensor):
                self._widened.append((tensor, tensor.dtype))
                tensor.data = tensor.data.float()
        if is_lean:
            self._round_parameters(model)

    def _round_parameters(self, model: nn.Module) -> None:
        with_statistics = trained_with_statistics(model)
        others = {torch.float32, *LOWER_PRECISION_DTYPES} - {self.policy.params}
        for parameter in model.parameters():
            # The weights of BatchNorm stay FP32 in a lean layout, as its statistics.
            is_fp32 = parameter in with_statistics or (self._only_trainable and not parameter.requires_grad)
            if parameter.dtype in others and not is_fp32 and not is_dtensor(parameter):
                before = parameter.data
                parameter.data = split(before.float(), self.policy.params).working
                self._rounded.append((parameter, before, parameter._version))

    def restore(self, model: nn.Module | None) -> None:
        """Restore dtypes and values; values written since then (synced from the policy model) are only cast."""
        for tensor, dtype in self._widened:
            tensor.data = tensor.data.to(dtype)
        for parameter, before, version in self._rounded:
            parameter.data = before if parameter._version == version else parameter.data.to(before.dtype)
        self._widened, self._rounded = [], []
        super().restore(model)


def _tensors_not_multiplied(model: nn.Module) -> Iterator[Tensor]:
    """Yield the buffers of ``model`` and the parameters that no matmul reads."""
    for module in model.modules():
        multiplies = not isinstance(module, (nn.Embedding, nn.EmbeddingBag))
        for name, parameter in module._parameters.items():
            if parameter is not None and not (multiplies and name == "weight" and parameter.dim() > 1):
                yield parameter
        yield from (buffer for buffer in module._buffers.values() if buffer is not None)
