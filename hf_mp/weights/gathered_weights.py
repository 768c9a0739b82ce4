"""``GatheredSlots``: parameter slots for weights that FSDP2 gathers during the forward, and for DTensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hf_mp.borders import AliasSetUse
from hf_mp.dtypes import LOWER_PRECISION_DTYPES
from hf_mp.ranks.parallelism import fsdp_modules, is_dtensor
from hf_mp.weights.external import ExternalTensors
from hf_mp.weights.slots import ParameterSlot, WeightSlots
from hf_mp.weights.spread_layouts import TensorParallelLayout
from hf_mp.weights.weight_uses import WeightUses


class GatheredSlots(WeightSlots):
    """Parameter slots that are filled when FSDP has gathered the weights, and restored when it frees them.

    FSDP has its own weights in ``_parameters``. So a slot is an entry of the module's ``__dict__``. The slot of a
    DTensor that ops compute with is in ``_parameters``.
    """

    external: ExternalTensors  # of the same forward

    def __init__(self, model: nn.Module, uses: WeightUses, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._model, self._uses = model, uses
        self._handles = list[RemovableHandle]()
        self._gathered = list[ParameterSlot]()  # whose weights have aliases
        # The base class has it from an alias set; here each forward makes its own aliases.
        self.alias_set_use = AliasSetUse((), self.scale_provider)
        # Whether ops compute with DTensors, which are there all the time: nothing is gathered.
        self._computes_on_shards = isinstance(self.layout, TensorParallelLayout)

    def __enter__(self) -> None:
        """Fill the slots of the weights that are there; hooks fill the others when they are gathered."""
        super().__enter__()
        if self.has_grad:
            self._fill(self._model)
            for module in fsdp_modules(self._model):
                # Hooks on a module that is compiled in place would be part of its graph.
                if module._compiled_call_impl is None:
                    self._handles.append(module.register_forward_pre_hook(self._fill))
                    self._handles.append(module.register_forward_hook(self._restore_gathered, always_call=True))
        if self._computes_on_shards:  # FSDP's slots are emptied
            self._versions = [value._version for _, value in self._filled]

    def _fill(self, gathered: nn.Module, *args: Any) -> None:
        """Fill the slots of the weights in ``gathered``: a hook before its forward."""
        with torch._C.DisableTorchFunction():  # autocast is active already, and casts nothing here
            # A DTensor under FSDP is of a module inside, which is gathered when its own forward begins.
            slots = self._uses.find_slots(gathered)
            slots = [slot for slot in slots if self._computes_on_shards or not is_dtensor(slot.weight)]
            slots = [slot for slot in slots if slot.weight.is_leaf or self.external.is_external(slot.weight)]
            for slot in slots:
                if slot.weight.dtype in LOWER_PRECISION_DTYPES and slot.weight.requires_grad:
                    slot.weight.grad_dtype = torch.float32  # what leaves through the border
            if self._computes_on_shards:  # Transformers < 5.23 sums a norm's .grad as soon as its backward has run
                self.groups_weights = False
            new = [slot.weight for slot in slots if slot.has_copy and id(slot.weight) not in self.aliases]
            copies = self.layout.working_copies(new)
            self._gathered += slots
            for slot, value in self.alias_weights(slots, copies):
                # FSDP puts its own among the parameters; Transformers takes DTensors from there for code on shards.
                attributes = vars(slot.module)
                (attributes["_parameters"] if is_dtensor(value) else attributes)[slot.name] = value
                self._filled.append((slot, value))

    def _restore_gathered(self, gathered: nn.Module, *args: Any) -> None:
        """Restore the slots in ``gathered`` and drop the aliases of its weights: a hook after its forward."""
        # FSDP frees the gathered weights; their working copies would stay.
        inner = set(gathered.modules())
        freed = [(slot, value) for slot, value in self._filled if slot.module in inner]
        self._filled = [(slot, value) for slot, value in self._filled if slot.module not in inner]
        self._restore_slots(freed)
        for slot in self._gathered:
            if slot.module in inner:
                for one in self.aliases.get(id(slot.weight)) or ():
                    self.aliases.pop(id(one), None)
        self._gathered = [slot for slot in self._gathered if slot.module not in inner]

    def _restore_slots(self, filled: list[tuple[ParameterSlot, Tensor]]) -> None:
        super()._restore_slots([(slot, value) for slot, value in filled if is_dtensor(value)])
        for slot, value in filled:
            if not is_dtensor(value):
                vars(slot.module).pop(slot.name, None)

    def __exit__(self, *raised: Any) -> None:
        """Restore the slots and release the gathered weights."""
        try:
            super().__exit__(*raised)
        finally:
            for handle in self._handles:
                handle.remove()
            self._handles, self._filled, self._gathered = [], [], []
            self.aliases.clear()
