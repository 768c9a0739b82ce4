"""Routers of mixtures of experts in FP32.

16-bit logits, and FP32 accumulation of 16-bit factors too, select other experts than FP32 for some tokens
(``scripts/bench.py routing``). The matmul is a hundredth of a layer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hf_mp.casting.autocast_stack import active_autocast
from hf_mp.models.base import ForwardReplacement, ReplacedForward


class FP32Router(ReplacedForward):
    """Replacement for the ``forward`` of a router that runs it in FP32, unless a rule names the router."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        mode, module = active_autocast(), self.module()
        # mode.module is the router in the nested autocast of a rule for it.
        if mode is None or not mode.enabled or mode.module is module or mode.has_rule_for(module):
            return self.original(*args, **kwargs)
        with mode.nested_autocast(module, torch.float32):
            return self.original(*mode.cast(args, torch.float32), **kwargs)


_NAMES = ("Router", "Gating", "MoEV1Gate")  # Mixtral, Llama 4, Switch; JetMoe; HunYuan


def is_router(kind: type[Any]) -> bool:
    return kind.__module__.startswith("transformers.models.") and kind.__name__.endswith(_NAMES)


FP32_ROUTERS = ForwardReplacement(FP32Router, is_router)


def is_fp32_router(module: nn.Module) -> bool:
    return isinstance(vars(module).get("forward"), FP32Router)
