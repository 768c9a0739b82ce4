"""``GatheredWeights``: the weights of one forward where FSDP2 gathers them while it runs, or products take DTensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hf_mp.borders import BorderUse
from hf_mp.dtypes import LOWER_PRECISION_DTYPES
from hf_mp.ranks.parallelism import fsdp_modules, is_dtensor
from hf_mp.weights.forward_weights import ForwardWeights
from hf_mp.weights.product_uses import Slot
from hf_mp.weights.spread_layouts import TensorParallelLayout


class GatheredWeights(ForwardWeights):
    """ForwardWeights whose slots are filled when FSDP has gathered the weights, and emptied when it frees them.

    FSDP has its own weights in ``_parameters``, so that a slot is an entry of the module's ``__dict__``; a DTensor that
    products take is in ``_parameters``.
    """

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._handles = list[RemovableHandle]()
        # The base class has these from lasting borders; here each forward makes its own.
        self._filled, self._border_use = [], BorderUse((), self._owner.crossings)
        # Whether products take DTensors, which are there all the time: nothing is gathered.
        self._computes_on_shards = isinstance(self._layout, TensorParallelLayout)

    def __enter__(self) -> None:
        """Fill the slots of the weights that are there; hooks fill the others when they are gathered."""
        super().__enter__()
        if self.has_grad:
            self._fill(self.model)
            for module in fsdp_modules(self.model):
                # Hooks on a module that is compiled in place would be part of its graph.
                if module._compiled_call_impl is None:
                    self._handles.append(module.register_forward_pre_hook(self._fill))
                    self._handles.append(module.register_forward_hook(self._empty, always_call=True))
        if self._computes_on_shards:  # FSDP's slots are emptied
            self._versions = [value._version for _, value in self._filled]

    def _fill(self, gathered: nn.Module, *args: Any) -> None:
        """Fill the slots of the weights in ``gathered``: a hook before its forward."""
        with torch._C.DisableTorchFunction():  # the region runs already, and has nothing to decide here
            # A DTensor under FSDP is of a module inside, which is gathered when its own forward begins.
            slots = self._uses.find_slots(gathered)
            slots = [slot for slot in slots if self._computes_on_shards or not is_dtensor(slot.weight)]
            slots = [slot for slot in slots if slot.weight.is_leaf or self._is_outside(slot.weight)]
            for slot in slots:
                if slot.weight.dtype in LOWER_PRECISION_DTYPES and slot.weight.requires_grad:
                    slot.weight.grad_dtype = torch.float32  # what leaves through the border
            if self._computes_on_shards:  # Transformers < 5.23 sums a norm's .grad as soon as its backward has run
                self.shares_borders = False
            copies = self._layout.working_copies([slot.weight for slot in slots if slot.in_16_bits])
            for slot, value in self._bring_in_all(slots, copies):
                # FSDP puts its own among the parameters; Transformers takes DTensors from there for code on shards.
                attributes = vars(slot.module)
                (attributes["_parameters"] if is_dtensor(value) else attributes)[slot.name] = value
                self._filled.append((slot, value))

    def _empty(self, gathered: nn.Module, *args: Any) -> None:
        """Give back the slots in ``gathered``, and forget their weights: a hook after its forward."""
        # FSDP frees what it has gathered; roundings of it would stay.
        inner = set(gathered.modules())
        freed = [(slot, value) for slot, value in self._filled if slot.module in inner]
        self._filled = [(slot, value) for slot, value in self._filled if slot.module not in inner]
        self._give_back(freed)
        for slot, _ in freed:
            for one in self._inside.get(id(slot.weight)) or ():
                self._inside.pop(id(one), None)

    def _give_back(self, filled: list[tuple[Slot, Tensor]]) -> None:
        super()._give_back([(slot, value) for slot, value in filled if is_dtensor(value)])
        for slot, value in filled:
            if not is_dtensor(value):
                vars(slot.module).pop(slot.name, None)

    def __exit__(self, *raised: Any) -> None:
        """Give the slots back, and let go of what was gathered."""
        try:
            super().__exit__(*raised)
        finally:
            for handle in self._handles:
                handle.remove()
            self._handles, self._filled = [], []
