"""``GatheredSlots``: parameter slots for FSDP2 and DTensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hf_mp.dtypes import LOWER_PRECISION_DTYPES
from hf_mp.ranks.parallelism import fsdp_modules, is_dtensor
from hf_mp.scale_boundary import AliasSetUse
from hf_mp.weights.external import ExternalTensors
from hf_mp.weights.sharded_layouts import TensorParallelLayout
from hf_mp.weights.slots import ParameterSlot, WeightSlots
from hf_mp.weights.weight_uses import WeightUses


class GatheredSlots(WeightSlots):
    """Parameter slots that are filled when FSDP2 has gathered the weights, and restored when it frees them.

    FSDP2 has its shards in ``_parameters``, so a slot is an entry of the module's ``__dict__``; for a DTensor that ops
    compute with, of ``_parameters``.
    """

    external: ExternalTensors  # set after construction

    def __init__(self, model: nn.Module, uses: WeightUses, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._model, self._uses = model, uses
        self._handles = list[RemovableHandle]()
        self._gathered = list[ParameterSlot]()  # slots of weights with aliases
        self.alias_set_use = AliasSetUse((), self.scale_provider)  # no alias set: each forward makes its aliases
        # Whether ops compute with DTensors, so that nothing is gathered.
        self._computes_on_shards = isinstance(self.layout, TensorParallelLayout)

    def __enter__(self) -> None:
        """Fill the slots of available weights; hooks fill the others when they are gathered."""
        super().__enter__()
        if self.has_grad:
            self._fill(self._model)
            for module in fsdp_modules(self._model):
                # Hooks on a module that is compiled in place would be traced.
                if module._compiled_call_impl is None:
                    self._handles.append(module.register_forward_pre_hook(self._fill))
                    self._handles.append(module.register_forward_hook(self._restore_gathered, always_call=True))
        # __exit__ compares versions. Those of the base class are of no slot, because _fill() has filled them since.
        # FSDP2's slots are restored before __exit__.
        if self._computes_on_shards:
            self._versions = [value._version for _, value in self._filled]

    def _fill(self, gathered: nn.Module, *args: Any) -> None:
        """Pre-forward hook of ``gathered``: fill the slots of its weights."""
        with torch._C.DisableTorchFunction():  # autocast is active, and must not cast here
            slots = self._available_slots(gathered)
            for slot in slots:
                if slot.weight.dtype in LOWER_PRECISION_DTYPES and slot.weight.requires_grad:
                    slot.weight.grad_dtype = torch.float32
            # Transformers < 5.23 sums the .grad of a norm over ranks as soon as its backward has run. In a group it
            # would wait for gradients of other weights.
            if self._computes_on_shards:
                self.groups_weights = False
            new = [slot.weight for slot in slots if slot.has_copy and id(slot.weight) not in self.aliases]
            copies = self.layout.working_copies(new)
            self._gathered += slots
            for slot, value in self.alias_weights(slots, copies):
                # Transformers reads DTensors from `_parameters`.
                entries = slot.module._parameters if is_dtensor(value) else vars(slot.module)
                entries[slot.name] = value  # type: ignore[assignment]
                self._filled.append((slot, value))

    def _available_slots(self, gathered: nn.Module) -> list[ParameterSlot]:
        """Return the slots of ``gathered`` with weights that ops can read now, and this forward did not compute."""
        slots = self._uses.find_slots(gathered)
        # Under FSDP2 a DTensor is a shard of an inner module, which is gathered later.
        slots = [slot for slot in slots if self._computes_on_shards or not is_dtensor(slot.weight)]
        return [slot for slot in slots if slot.weight.is_leaf or self.external.is_external(slot.weight)]

    def _restore_gathered(self, gathered: nn.Module, *args: Any) -> None:
        """Forward hook of ``gathered``: restore its slots, and drop the aliases of the weights that FSDP2 frees."""
        freed = set(gathered.modules())
        self._restore_slots([(slot, value) for slot, value in self._filled if slot.module in freed])
        self._filled = [(slot, value) for slot, value in self._filled if slot.module not in freed]
        for slot in [slot for slot in self._gathered if slot.module in freed]:
            for one in self.aliases.get(id(slot.weight)) or ():
                self.aliases.pop(id(one), None)
        self._gathered = [slot for slot in self._gathered if slot.module not in freed]

    def _restore_slots(self, filled: list[tuple[ParameterSlot, Tensor]]) -> None:
        super()._restore_slots([(slot, value) for slot, value in filled if is_dtensor(value)])
        for slot, value in filled:
            if not is_dtensor(value):
                vars(slot.module).pop(slot.name, None)

    def __exit__(self, *raised: Any) -> None:
        try:
            super().__exit__(*raised)
        finally:
            for handle in self._handles:
                handle.remove()
            self._handles, self._filled, self._gathered = [], [], []
            self.aliases.clear()
