"""``WeightUses``: finds parameter slots, and the weights of lower-precision ops."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from hf_mp.casting.experts import WEIGHTS, has_stacked_experts
from hf_mp.model_index import modules_of
from hf_mp.weights.slots import ParameterSlot

_OFFLOADED_DEVICES = ("meta",)  # accelerate loads such weights when their module is called
_USUAL = ("weight", "bias")
_PROJECTIONS = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight", "in_proj_bias")
# Weights that a forward passes to an op, and that op. A subclass with another forward may use a weight differently.
_WEIGHTS_BY_FORWARD: dict[Callable[..., object], tuple[Iterable[str], Callable[..., object] | None]] = {
    nn.Linear.forward: (_USUAL, F.linear),
    nn.Conv1d.forward: (_USUAL, F.conv1d),
    nn.Conv2d.forward: (_USUAL, F.conv2d),
    nn.Conv3d.forward: (_USUAL, F.conv3d),
    nn.ConvTranspose1d.forward: (_USUAL, F.conv_transpose1d),
    nn.ConvTranspose2d.forward: (_USUAL, F.conv_transpose2d),
    nn.ConvTranspose3d.forward: (_USUAL, F.conv_transpose3d),
    nn.MultiheadAttention.forward: (_PROJECTIONS, F.linear),
}


class WeightUses:
    """Finds the parameter slots of one model, and which weights have a working copy from the first forward on.

    These are the weights of linear layers, convolutions, attention projections and stacked experts. Others get one when
    a lower-precision op first reads them (:meth:`hf_mp.weights.slots.WeightSlots.working_copy`). The slots of stacked
    experts hold the working copy, because their forward selects experts, and the selection would be cast at each use.

    Args:
        is_lower_precision: whether autocast casts an op to FP16/BF16.
        with_rules: modules with autocast rules; their weights get no working copy in advance.
    """

    def __init__(
        self, is_lower_precision: Callable[[Callable[..., object] | None], bool], with_rules: Iterable[nn.Module] = ()
    ) -> None:
        self._is_lower_precision = is_lower_precision
        # Names of the weights with a working copy in advance.
        self._names = weakref.WeakKeyDictionary[nn.Module, frozenset[str]](dict.fromkeys(with_rules, frozenset()))

    def find_slots(self, model: nn.Module) -> list[ParameterSlot]:
        """Return the slots of the weights of ``model``, except those that an attribute in ``__dict__`` hides."""
        found = []
        for module in modules_of(model):
            attributes = vars(module)
            children = attributes.get("_modules", ())  # of a scripted module a mapping without `get`
            if "base_layer" in children:
                base = children["base_layer"]
                if base not in self._names and has_stacked_experts(base):
                    # PEFT adds to these weights in a parametrization that must not change their dtype, FP32.
                    self._names[base] = frozenset()
            parameters = attributes.get("_parameters")  # absent in a traced module
            if not parameters:
                continue
            names = self._names.get(module)
            names = self._names_by_class(module) if names is None else names
            holds_copies = bool(names) and has_stacked_experts(module)
            for name, weight in parameters.items():
                if weight is not None and name not in attributes and weight.device.type not in _OFFLOADED_DEVICES:
                    has_copy = name in names
                    found.append(ParameterSlot(module, name, weight, has_copy, has_copy and holds_copies))
        return found

    def _names_by_class(self, module: nn.Module) -> frozenset[str]:
        forward: Any = getattr(type(module), "forward", None)  # absent in a scripted module
        if (transformers := sys.modules.get("transformers.pytorch_utils")) is not None:
            _WEIGHTS_BY_FORWARD.setdefault(transformers.Conv1D.forward, (_USUAL, torch.addmm))
        names, op = _WEIGHTS_BY_FORWARD.get(forward, ((), None))
        if has_stacked_experts(module):
            names, op = WEIGHTS, torch.bmm
        found = self._names[module] = frozenset(names if self._is_lower_precision(op) else ())
        return found
