"""Losses of Transformers' language models from FP16/BF16 logits, without a cast of all logits to FP32."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hf_mp.kernels.cross_entropy import FEW_ELEMENTS, cross_entropy
from hf_mp.kernels.tensors import is_ordinary
from hf_mp.kernels.transforms import is_compiling_or_transforming
from hf_mp.models.base import ModelReplacement


class LMLoss:
    """Replacement for ``ForCausalLMLoss`` or ``ForMaskedLMLoss`` of Transformers, with the same arguments and value.

    It uses :func:`hf_mp.kernels.cross_entropy.cross_entropy`, or torch's for few logits. The original is called for
    FP64 logits, compiled code, ``torch.func`` and tensor subclasses, which the autograd function does not support.
    """

    def __init__(self, loss_type: str) -> None:
        self.loss_type = loss_type  # Transformers' name

    def __call__(
        self, logits: Tensor, labels: Tensor, vocab_size: int, num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = -100, shift_labels: Tensor | None = None, **kwargs: Any,
    ) -> Tensor:  # fmt: skip
        if not is_ordinary(logits) or logits.dtype is torch.float64 or is_compiling_or_transforming():
            kwargs.update(num_items_in_batch=num_items_in_batch, ignore_index=ignore_index, shift_labels=shift_labels)
            return _original(self.loss_type)(logits, labels, vocab_size, **kwargs)
        targets = labels
        if self.loss_type == "ForCausalLM":  # each token predicts the next
            targets = F.pad(labels, (0, 1), value=ignore_index)[..., 1:] if shift_labels is None else shift_labels
        targets = targets.reshape(-1).to(logits.device)
        reduction = "mean" if num_items_in_batch is None else "sum"
        loss_function = F.cross_entropy if logits.numel() < FEW_ELEMENTS else cross_entropy
        loss = loss_function(logits.view(-1, vocab_size), targets, ignore_index=ignore_index, reduction=reduction)
        if isinstance(num_items_in_batch, Tensor):
            num_items_in_batch = num_items_in_batch.to(loss.device)
        return loss if num_items_in_batch is None else loss / num_items_in_batch

    def __deepcopy__(self, memo: Any) -> LMLoss:
        return self

    def __reduce__(self) -> Any:
        # A pickled model has the original loss.
        return _original, (self.loss_type,)


def _original(loss_type: str) -> Any:
    # With a model of Transformers, the module is imported.
    return sys.modules["transformers.loss.loss_utils"].LOSS_MAPPING[loss_type]


class LMLossReplacement(ModelReplacement):
    """Replaces the losses of Transformers models, except custom losses."""

    def install(self, model: nn.Module) -> None:
        modeling, losses = (sys.modules.get(f"transformers.{name}") for name in ("modeling_utils", "loss.loss_utils"))
        if modeling is None or losses is None:
            return
        ours = {_original(name): LMLoss(name) for name in ("ForCausalLM", "ForMaskedLM")}
        default = _original("ForCausalLM")  # as in Transformers
        for module in model.modules():
            if isinstance(module, modeling.PreTrainedModel) and "_loss_function" not in module.__dict__:
                original = losses.LOSS_MAPPING.get(str(getattr(module, "loss_type", None)), default)
                if original in ours:
                    module._loss_function = ours[original]

    def remove(self, model: nn.Module) -> None:
        for module in model.modules():
            if isinstance(module.__dict__.get("_loss_function"), LMLoss):
                del module._loss_function
