"""Stacked experts of Transformers' mixtures: of which expert each row of a call is.

A module of stacked experts has one parameter of three dimensions for the weights of all experts. It multiplies them by
one grouped product of tokens that are sorted by expert, by a batched product of the weights that each token gathers, or
in a loop over the experts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

_FORWARD = "transformers.integrations.moe"  # its forward takes the place of that of every class of stacked experts
WEIGHTS = ("gate_up_proj", "up_proj", "down_proj")


def has_stacked_experts(module: nn.Module) -> bool:
    """Whether ``module`` is of a class of Transformers that stacks the weights of experts."""
    # Transformers' decorator gives the classes no base class or mark in common, only this forward.
    forward = getattr(type(module), "forward", None)  # a scripted module has none
    return getattr(forward, "__globals__", {}).get("__name__") == _FORWARD


def expert_counts(model: nn.Module) -> dict[str, int]:
    """The number of experts of each parameter in ``model`` that has one entry for each, by its name."""
    return {
        f"{name}.{key}" if name else key: module.num_experts
        for name, module in model.named_modules()
        if has_stacked_experts(module)
        for key, parameter in module._parameters.items()
        if parameter is not None and parameter.shape[0] == module.num_experts
    }


@dataclass(frozen=True)
class ExpertRows:
    """Of which expert the rows of a call's operands and results are.

    Attributes:
        weight: name of the stacked weight in its module, such as ``"gate_up_proj"``.
        experts: int64 of shape (rows,): the expert of each; below 0 for none.
        is_whole: whether the call has all of the stacked weight, so that the gradient has an entry for each expert.
    """

    weight: str
    experts: Tensor
    is_whole: bool = False

    def found_in(self, marks: Tensor) -> list[int]:
        """The experts in whose rows (or whose entry, of a whole weight) of ``marks``, bool, one is true."""
        if marks.dim() == 3 and self.is_whole:
            return entries_in(marks)
        if marks.dim() > 1 and len(marks) == len(self.experts):
            found = self.experts[marks.flatten(1).any(1).to(self.experts.device)]
        else:  # in a loop, a call has the rows of one expert, and the gradient of its weight no rows
            found = self.experts.unique() if marks.any() else self.experts[:0]
            found = found if len(found) == 1 else found[:0]
        return [expert for expert in found.unique().tolist() if expert >= 0]


def entries_in(marks: Tensor) -> list[int]:
    """The entries along the first dimension of ``marks``, bool, in which one is true."""
    found: list[int] = marks.flatten(1).any(1).nonzero().flatten().tolist()
    return found


def product_of_experts(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[int | str, ExpertRows] | None:
    """Where a call of ``module`` has the weights of experts, and of which expert each row is; None without weights."""
    operands: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
    for place, operand in operands.items():
        if not isinstance(operand, Tensor) or operand.dim() < 2:
            continue
        if (rows := getattr(operand, "_of_experts", None)) is not None:
            return place, rows
        if (held := _part_of(module, operand)) is None:
            continue
        name, expert = held
        if operand.dim() == 3:
            offsets = kwargs["offs"] if "offs" in kwargs else args[-1]
            return place, ExpertRows(name, _sorted_rows(offsets, operands), is_whole=True)
        others = (other for other in operands.values() if isinstance(other, Tensor) and other is not operand)
        size = next(map(len, others), 1)
        return place, ExpertRows(name, torch.full((size,), expert, device=operand.device))
    return None


def _part_of(module: nn.Module, operand: Tensor) -> tuple[str, int] | None:
    """The stacked weight of ``module`` in whose memory ``operand`` begins, and the expert whose part begins there."""
    # By address: a loop over the experts multiplies by views, and a view does not tell of what it is one.
    for name in WEIGHTS:
        stacked = _held(module, name)
        if stacked is not None and 0 <= (start := operand.data_ptr() - stacked.data_ptr()) < stacked.nbytes:
            return name, start // (stacked.stride(0) * stacked.element_size())
    return None


def note_gathered(module: nn.Module, func: Callable[..., Any], args: tuple[Any, ...], result: Any) -> None:
    """Have the weights that each token gathers from a stacked one, ``module.gate_up_proj[expert_ids]``, know it."""
    if func is not Tensor.__getitem__ or not isinstance(args[1], Tensor) or args[1].dim() != 1:
        return
    name = next((name for name in WEIGHTS if _held(module, name) is args[0]), None)
    if name is not None:
        result._of_experts = ExpertRows(name, args[1])  # where product_of_experts() looks for them


def _held(module: nn.Module, name: str) -> Tensor | None:
    """What lies in the slot of a stacked weight, with no parametrization asked; None for another parameter."""
    held = vars(module).get(name, module._parameters.get(name))
    return held if isinstance(held, Tensor) and held.dim() == 3 and held.layout is torch.strided else None


def _sorted_rows(offsets: Any, operands: Mapping[Any, Any]) -> Tensor:
    """The expert of each row of tokens that are sorted by expert, whose ends ``offsets`` has."""
    if not isinstance(offsets, Tensor) or offsets.dtype is not torch.int32:  # no product: a part or another order
        return torch.empty(0, dtype=torch.int64)
    rows = next(len(one) for one in operands.values() if isinstance(one, Tensor) and one.dim() == 2)
    sizes = offsets.diff(prepend=offsets.new_zeros(1))
    found = torch.arange(len(offsets), device=offsets.device).repeat_interleave(sizes)
    return torch.cat([found, found.new_full((rows - len(found),), -1)])


class ExpertCall(NamedTuple):
    """A call of a module of stacked experts."""

    weight: str  # full name of the stacked weight
    rows: ExpertRows
    place: int | str | None  # of the weight among what the call is given; None for what comes after a product

    def expert(self, index: int) -> str:
        """The full name of an expert's weight."""
        return f"{self.weight}[{index}]"


class ExpertCalls:
    """Follows the calls of a model's stacked experts.

    What comes after a product (activations, gates) has its rows until another order is made of them.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules = {name: module for name, module in model.named_modules() if has_stacked_experts(module)}
        self._last: dict[str, ExpertRows] = {}

    def of(
        self, module: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> ExpertCall | None:
        """Of which expert each row of a call is that ``module`` makes; None where that is not known."""
        owner = module if module in self._modules else module.rpartition(".")[0]
        if (experts := self._modules.get(owner)) is None:
            return None
        # What is asked of the operands is no call of the model, and no mode is to see it.
        with torch._C.DisableTorchFunction():
            place, rows = product_of_experts(experts, args, kwargs) or (None, self._last.get(owner))
        if place is None and func is Tensor.__getitem__ and isinstance(args[1], Tensor):
            rows = None  # in another order, or of other rows
        self._last.pop(owner, None)
        if rows is None:
            return None
        self._last[owner] = rows
        return ExpertCall(f"{owner}.{rows.weight}" if owner else rows.weight, rows, place)

    def made(self, module: str, func: Callable[..., Any], args: tuple[Any, ...], result: Any) -> None:
        """A call of ``module`` has been made."""
        if (experts := self._modules.get(module)) is not None:
            note_gathered(experts, func, args, result)
