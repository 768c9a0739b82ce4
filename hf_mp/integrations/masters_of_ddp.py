"""Add the remainders of split parameters to DDP's broadcasts of weights, when it is made and at the end of ``join()``.

DDP broadcasts the 16 bits in C++, whether or not they change. A write by other code resets the remainder.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import torch
from torch import nn

from hf_mp.casting.torch_patches import Patch, Patches, around
from hf_mp.weights.split_parameter import SplitParameter, broadcast_remainders


@around
def _sync_with_remainders(
    original: Any, module: nn.Module, process_group: Any, broadcast_bucket_size: int, src: int,
    params_and_buffers_to_ignore: Container[str], *args: Any, **kwargs: Any,
) -> None:  # fmt: skip
    named = module.named_parameters()
    split = [p for name, p in named if isinstance(p, SplitParameter) and name not in params_and_buffers_to_ignore]
    # Weights that user code has written get remainders of 0 before DDP writes all, because version counters do not
    # distinguish the writes afterwards.
    for parameter in split:
        parameter.reset_written_remainders()
    original(module, process_group, broadcast_bucket_size, src, params_and_buffers_to_ignore, *args, **kwargs)
    broadcast_remainders(split, process_group, src)


DDP_PATCHES = Patches(
    (
        Patch(
            ("torch.nn.parallel.distributed:_sync_module_states",),
            _sync_with_remainders,
            "DistributedDataParallel rounds the FP32 masters of a lean layout when it wraps the model",
        ),
    )
    if torch.distributed.is_available()
    else ()
)
