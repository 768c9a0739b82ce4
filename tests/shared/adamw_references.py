"""What the fused AdamW update is held against on a CPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_mp.kernels.adamw import AdamWSettings, AdamWTensors
from hf_mp.kernels.split import merge, split_into


def adamw_by_torch(tensors: AdamWTensors, settings: AdamWSettings, factor: Tensor | None = None) -> None:
    """A step of one parameter by torch's fused AdamW, on a whole FP32 master and a whole FP32 gradient."""
    given: Any = tensors
    tensors.step.add_(1)
    master = merge(given.working, given.remainder) if tensors.master is None else tensors.master
    gradient = tensors.gradient.contiguous().float()
    gradient = gradient if factor is None else gradient * factor.squeeze()
    moments: Any = [tensors.exp_avg], [tensors.exp_avg_sq], [], [tensors.step]
    torch._fused_adamw_([master], [gradient], *moments, amsgrad=False, maximize=False, **vars(settings))
    if tensors.remainder is not None:
        split_into(master, given.working, tensors.remainder)
    elif tensors.working is not None:
        tensors.working.copy_(master)
