"""Makes the meta device use memory as a CUDA GPU does.

Autograd over fake CUDA tensors needs a CUDA build of torch. The meta device does not, and ops have the same shapes and
dtypes there, with four exceptions that this module corrects:

- attention runs in the flash or memory-efficient kernel, which save no matrix of scores;
- dropout saves a mask of one byte an element (torch.native_dropout);
- ``torch.autocast`` does not support the meta device: :class:`hf_mp.autocast` with torch's CUDA tables replaces it;
- fused optimizers refuse the meta device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim import optimizer as torch_optimizer
from torch.utils._foreach_utils import _get_fused_kernels_supported_devices

from hf_mp.policy import LOWER_PRECISION_DTYPES

STAND_IN = torch.device("meta")

_FLASH_HEAD_DIM = 256  # the largest that the flash kernel takes


@contextlib.contextmanager
def kernels_of_a_gpu() -> Iterator[None]:
    """Have attention and dropout on the meta device run as on a CUDA GPU."""
    # In torch's dispatcher: backward, which recomputes checkpointed blocks, runs outside torch function modes.
    library = torch.library.Library("aten", "IMPL")
    library.impl("scaled_dot_product_attention", _attention, "AutogradMeta")
    library.impl("dropout", _dropout, "AutogradMeta")
    try:
        yield
    finally:
        library._destroy()


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    width = query.shape[-1]
    if query.dtype in LOWER_PRECISION_DTYPES and attn_mask is None and width <= _FLASH_HEAD_DIM:
        scale = width**-0.5 if scale is None else scale
        padded = [F.pad(tensor, (0, -width % 8)) if width % 8 else tensor for tensor in (query, key, value)]
        flash = torch.ops.aten._scaled_dot_product_flash_attention.default
        output = flash(*padded, dropout_p, is_causal, False, scale=scale)[0]
        return output[..., :width] if width % 8 else output
    if enable_gqa and query.shape[-3] != key.shape[-3]:  # only the flash kernel shares heads
        mathematics = torch.ops.aten._scaled_dot_product_attention_math.default
        return mathematics(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=True)[0]
    if attn_mask is not None:
        if attn_mask.dtype is torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(attn_mask.logical_not(), -torch.inf)
        attn_mask = attn_mask.expand(*query.shape[:-1], key.shape[-2])
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention.default
    needs_gradient = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value))
    return efficient(query, key, value, attn_mask, needs_gradient, dropout_p, is_causal, scale=scale)[0]


def _dropout(input: Tensor, p: float, train: bool) -> Tensor:
    return torch.native_dropout(input, p, True)[0] if train and p > 0.0 else input


@contextlib.contextmanager
def fused_optimizers() -> Iterator[None]:
    """Have torch's fused optimizers take parameters on the meta device."""
    supported = _get_fused_kernels_supported_devices()
    with mock.patch.object(
        torch_optimizer, "_get_fused_kernels_supported_devices", lambda: [*supported, STAND_IN.type]
    ):
        yield
