"""Omit PEFT's cast of the inputs of adapters to FP32, the dtype of their weights: autocast casts them back.

The matmul has the same bits, and backward keeps no second 16-bit copy of the input.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from hf_mp.casting.autocast_stack import active_autocast
from hf_mp.models.base import ModelReplacement

_SWITCH = "cast_input_dtype_enabled"  # PEFT's
# Kinds that only multiply their input by weights. Others compute with it in FP32.
_KINDS = ("peft.tuners.lora.", "peft.tuners.adalora.")


class _OutsideOfAutocast:
    """Takes the place of True: False where an autocast casts the inputs of matmuls."""

    def __bool__(self) -> bool:
        mode = active_autocast()
        return mode is None or not mode.enabled

    def __deepcopy__(self, memo: Any) -> _OutsideOfAutocast:
        return self

    def __reduce__(self) -> Any:
        return bool, (True,)  # a pickled model is an ordinary one


class AdapterInputs(ModelReplacement):
    """Leaves the inputs of LoRA and AdaLoRA layers to autocast, except with a variant like DoRA."""

    def install(self, model: nn.Module) -> None:
        for module in model.modules():
            attributes = vars(module)
            # DoRA casts the frozen weight to the dtype of the input.
            is_plain = type(module).__module__.startswith(_KINDS) and not attributes.get("lora_variant")
            if is_plain and attributes.get(_SWITCH) is True:
                attributes[_SWITCH] = _OutsideOfAutocast()

    def remove(self, model: nn.Module) -> None:
        for module in model.modules():
            if isinstance(vars(module).get(_SWITCH), _OutsideOfAutocast):
                vars(module)[_SWITCH] = True
