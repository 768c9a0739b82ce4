"""Which slots of a model hold 16 bits while a forward runs: those of weights that only products use."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Hashable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hf_mp.casting.experts import WEIGHTS, has_stacked_experts
from hf_mp.model_walk import modules_of


class Slot(NamedTuple):
    """Where a weight is looked up."""

    module: nn.Module
    name: str
    weight: Tensor
    in_16_bits: bool  # whether it holds the working copy while a forward runs, if the weight has one


_ABSENT = ("meta",)  # devices of weights that accelerate has offloaded, and loads when their module is called
_USUAL = ("weight", "bias")
_PROJECTIONS = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight", "in_proj_bias")
# The weights that a known forward gives to an op, and that op. By forward: a subclass that has one of its own may use a
# weight in other ways.
_MULTIPLIED: dict[Callable[..., Any], tuple[Iterable[str], Callable[..., Any] | None]] = {
    nn.Linear.forward: (_USUAL, F.linear),
    nn.Conv1d.forward: (_USUAL, F.conv1d),
    nn.Conv2d.forward: (_USUAL, F.conv2d),
    nn.Conv3d.forward: (_USUAL, F.conv3d),
    nn.ConvTranspose1d.forward: (_USUAL, F.conv_transpose1d),
    nn.ConvTranspose2d.forward: (_USUAL, F.conv_transpose2d),
    nn.ConvTranspose3d.forward: (_USUAL, F.conv_transpose3d),
    nn.MultiheadAttention.forward: (_PROJECTIONS, F.linear),
}


# For each use of a weight in a forward, whether a product made it: by the identity of the weight, and the kind of slot
# that it was taken from. A tied weight has both, since an embedding reads FP32 and a head the copy.
Notes = dict[tuple[int, bool], list[bool]]


class ProductUses:
    """Which weights of one model only products use: the slots of these hold 16 bits while a forward runs.

    They are those of modules whose forward is known to multiply by them (linear layers, convolutions, projections of
    attention), and of other modules those that a forward gave to one op of the lower-precision tables. Where a forward
    gave a weight to any other op (a norm of it, as DoRA takes; a sum; what runs in an FP32 island), the slot holds FP32
    from then on, and that op is given the FP32 weight. The first forward of each kind that ends is looked at: training
    may do what an evaluation does not. Compiled code shows its ops to nobody: there the class decides alone.

    Args:
        lowers: whether autocast runs an op in 16 bits.
        ruled: modules for which a rule decides.
    """

    def __init__(self, lowers: Callable[[Callable[..., Any] | None], bool], ruled: Iterable[nn.Module] = ()) -> None:
        self._lowers = lowers
        # By module and name of a weight, whether its slot holds 16 bits; without an entry it does not yet.
        self._decided: weakref.WeakKeyDictionary[nn.Module, dict[str, bool]] = weakref.WeakKeyDictionary()
        for module in ruled:
            self._decided[module] = dict.fromkeys(vars(module).get("_parameters", ()), False)
        # By the kinds of forwards that have ended, whether a mode has to watch their calls: they use what came from
        # outside, or read `.data` of a weight, or a dtype to cast by it (ForwardWeights.dtype_of).
        self.is_watched: dict[Hashable, bool] = {}

    def find_slots(self, model: nn.Module) -> list[Slot]:
        """The slots of the weights of ``model``, except weights that an attribute in ``__dict__`` hides."""
        found = []
        for module in modules_of(model):
            attributes = vars(module)
            if "base_layer" in (parts := attributes.get("_modules", ())):
                base = parts["base_layer"]
                if base not in self._decided and has_stacked_experts(base):
                    # PEFT adds to them, in FP32, in a parametrization that may not change their dtype.
                    self._decided[base] = dict.fromkeys(WEIGHTS, False)
            if parameters := attributes.get("_parameters"):  # a traced module has none of its own
                decided = self._decided.get(module)
                decided = self._decide_by_class(module) if decided is None else decided
                for name, weight in parameters.items():
                    if weight is not None and name not in attributes and weight.device.type not in _ABSENT:
                        found.append(Slot(module, name, weight, decided.get(name, False)))
        return found

    def _decide_by_class(self, module: nn.Module) -> dict[str, bool]:
        forward: Any = getattr(type(module), "forward", None)  # a scripted module has none
        if forward not in _MULTIPLIED and (transformers := sys.modules.get("transformers.pytorch_utils")) is not None:
            _MULTIPLIED[transformers.Conv1D.forward] = _USUAL, torch.addmm
        names, op = (WEIGHTS, torch.bmm) if has_stacked_experts(module) else _MULTIPLIED.get(forward, ((), None))
        self._decided[module] = decided = dict.fromkeys(names, True) if self._lowers(op) else {}
        return decided

    def record_uses(self, kind: Hashable, slots: Iterable[Slot], notes: Notes, *, is_watched: bool) -> None:
        """Take in what the first forward of this kind did with the weights of these slots."""
        self.is_watched[kind] = is_watched
        for slot in slots:
            uses = notes.get((id(slot.weight), slot.in_16_bits), [])
            if not all(uses):
                self._decided[slot.module][slot.name] = False
            # Used twice, each use of an FP32 weight has its own cast, and their gradients are summed in FP32.
            elif uses == [True]:
                self._decided[slot.module].setdefault(slot.name, True)
