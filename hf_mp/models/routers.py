"""Routers of mixtures of experts, which choose the experts of a token: in FP32.

Logits in 16 bits choose other experts than FP32's for some tokens, and so do FP32 sums of 16-bit factors
(``scripts/bench.py routing``); the product is a hundredth of a layer's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hf_mp.casting.active import active_autocast
from hf_mp.models.base import ForwardReplacement, ReplacedForward


class FP32Router(ReplacedForward):
    """Takes the place of a router's ``forward``, and runs it in FP32, unless a rule names the router."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        mode, module = active_autocast(), self.module()
        # An island of its own is one that a rule for it has made.
        if mode is None or not mode.enabled or mode.module is module or mode.has_rule_for(module):
            return self.original(*args, **kwargs)
        with mode.island(module, torch.float32):
            return self.original(*mode.cast(args, torch.float32), **kwargs)


_NAMES = ("Router", "Gating", "MoEV1Gate")  # of Mixtral, Llama 4, Switch; of JetMoe; of HunYuan


def is_router(kind: type[Any]) -> bool:
    """Whether a class of Transformers, which names it so, chooses experts by their logits."""
    return kind.__module__.startswith("transformers.models.") and kind.__name__.endswith(_NAMES)


FP32_ROUTERS = ForwardReplacement(FP32Router, is_router)


def is_fp32_router(module: nn.Module) -> bool:
    """Whether an attached model has this module run in FP32 because it chooses experts."""
    return isinstance(vars(module).get("forward"), FP32Router)
