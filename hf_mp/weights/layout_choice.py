"""Which layout a policy asks for, and how a model is spread over processes."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from hf_mp.policy import PrecisionPolicy
from hf_mp.weights.layout import WeightLayout
from hf_mp.weights.lean.layouts import SplitLayout
from hf_mp.weights.ranks.layouts import TensorParallelLayout, TransientLayout
from hf_mp.weights.ranks.parallelism import Parallelism, is_dtensor


def make_layout(policy: PrecisionPolicy) -> WeightLayout:
    """The layout that a policy's ``params`` asks for."""
    return WeightLayout(policy) if policy.params is torch.float32 else SplitLayout(policy)


def spread_layout(layout: WeightLayout, parameters: Iterable[Tensor], parallelism: Parallelism) -> WeightLayout:
    """The layout that follows ``layout`` on several processes, for ``parameters`` of a model, or of its optimizer.

    Raises:
        ValueError: for a lean layout of a model that is tensor parallel.
    """
    # Plain tensors need no other layout: DDP holds whole weights.
    if isinstance(layout, TransientLayout) or not any(map(is_dtensor, parameters)):
        return layout
    policy = layout.policy
    if not parallelism.is_tensor_parallel:
        # Of a lean model too: fully_shard has read its weights as what they are, FP32 values.
        return TransientLayout(policy)
    if isinstance(layout, SplitLayout):
        raise ValueError(
            f"precision={str(policy)!r} keeps the rest of each master next to a whole weight, and this "
            f"model is tensor parallel: use {str(policy).removesuffix('-lean')!r}"
        )
    return TensorParallelLayout(policy)
