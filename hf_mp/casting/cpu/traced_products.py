"""The product of 16-bit tensors on a CPU without 16-bit arithmetic, as one op of compiled graphs.

Inductor would cast whole operands to FP32, and have the BLAS library multiply them. The op runs block by block, as the
products of uncompiled code do (:mod:`hf_mp.casting.cpu.products`), and so do its gradients.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_mp.casting.cpu.blockwise import blockwise_product

LEAST_ELEMENTS = 2**16  # of a weight: products with smaller ones are left to the compiler, which fuses their casts


def may_be_traced(weight: Tensor) -> bool:
    """Whether a product with ``weight`` is to be this op: in code for ``torch.compile``, where it is large enough."""
    # An exported program is for machines without this library. torch 2.11's is_exporting() is always true in a trace.
    is_exported = getattr(torch.compiler, "_is_exporting_flag", False)
    is_for_us = torch.compiler.is_dynamo_compiling() and not is_exported
    # The op has neither forward-mode derivatives nor rules for torch.func.
    return is_for_us and not torch._C._are_functorch_transforms_active() and weight.numel() >= LEAST_ELEMENTS


@torch.library.custom_op("hf_mp::product_through_fp32", mutates_args=(), device_types="cpu")
def product_through_fp32(left: Tensor, right: Tensor, bias: Tensor | None) -> Tensor:
    """``left @ right + bias`` of 16-bit (M, K), (K, N) and (N,), accumulated in FP32 and rounded once."""
    return blockwise_product(left, right.t(), bias)


@product_through_fp32.register_fake
def _(left: Tensor, right: Tensor, bias: Tensor | None) -> Tensor:
    return left.new_empty(left.shape[0], right.shape[1])


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor | None], output: Tensor) -> None:
    left, right, _ = inputs
    ctx.save_for_backward(left, right)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    left, right = ctx.saved_tensors
    needs_left, needs_right, needs_bias = ctx.needs_input_grad
    return (
        product_through_fp32(gradient, right.t(), None) if needs_left else None,
        product_through_fp32(left.t(), gradient, None) if needs_right else None,
        gradient.float().sum(0).to(gradient.dtype) if needs_bias else None,
    )


product_through_fp32.register_autograd(_backward, setup_context=_save)
