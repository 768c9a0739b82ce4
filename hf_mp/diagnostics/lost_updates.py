"""Which parameters have no FP32 master, and what share of their updates rounding would drop: told before training."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from hf_mp.diagnostics.magnitudes import sample
from hf_mp.policy import LOWER_PRECISION_DTYPES, spell
from hf_mp.weights.accelerated import as_accelerated
from hf_mp.weights.distributed import local_part
from hf_mp.weights.split_parameter import SplitParameter, gradient_and_factor

_LOSES_MANY = 0.01  # share of updates from which on the advice is to keep masters


@dataclass(frozen=True)
class ParameterUpdates:
    """One trainable parameter before its update.

    Attributes:
        name: as in ``named_parameters()``.
        dtype: of the parameter, as torch prints it, without "torch.".
        elements: how many it has, on this process.
        has_master: whether its updates are summed up in FP32.
        lost_share: share of updates that leave their element as it is, bit for bit; None where the size of an update
            is not known.
    """

    name: str
    dtype: str
    elements: int
    has_master: bool
    lost_share: float | None


@dataclass(frozen=True)
class TrainingCheck:
    """What :func:`check_training` found; prints as a table.

    Attributes:
        parameters: those that the optimizer updates, in the order of the model.
        learning_rate: the largest of the optimizer's groups.
    """

    parameters: tuple[ParameterUpdates, ...]
    learning_rate: float | None

    @property
    def without_masters(self) -> tuple[str, ...]:
        """The names of the parameters that are updated in FP16 or BF16."""
        return tuple(one.name for one in self.parameters if not one.has_master)

    @property
    def lost_share(self) -> float | None:
        """The share of all updates whose size is known that would be lost; None where none is."""
        return _share(self.parameters)

    @property
    def advice(self) -> str:
        """What to do; empty if nothing."""
        if not (names := self.without_masters):
            return ""
        lost = _share([one for one in self.parameters if not one.has_master])
        if lost is not None and lost < _LOSES_MANY:
            return ""
        dtypes = sorted({one.dtype for one in self.parameters if not one.has_master})
        share = "an unknown share" if lost is None else f"{lost:.0%}"
        rate = "" if self.learning_rate is None else f" at learning rate {self.learning_rate:g}"
        return (
            f"{len(names)} of {len(self.parameters)} trainable parameters are {' and '.join(dtypes)} without an FP32 "
            f"master, and {share} of their updates{rate} are less than half a unit in the last place: rounding drops "
            "them. Give them masters: MixedPrecisionCallback('bf16') or hf_mp.prepare(model, optimizer, 'bf16'), or "
            "load the model with dtype=torch.float32"
        )

    def __str__(self) -> str:
        from rich.console import Console  # printing alone needs it
        from rich.table import Table

        table = Table("parameters", "dtype", "FP32 master")
        for column in ("elements", "updates lost"):
            table.add_column(column, justify="right")
        for name, ones in self._folded():
            share = _share(ones)
            lost = "not known" if share is None else f"{share:.1%}"
            master = "yes" if ones[0].has_master else "no"
            table.add_row(name, spell(ones[0].dtype), master, f"{sum(one.elements for one in ones):,}", lost)
        console = Console(width=80, highlight=False)
        with console.capture() as text:
            console.print(table)
            if self.advice:
                console.print(self.advice)
        return text.get()

    def _folded(self) -> Iterator[tuple[str, list[ParameterUpdates]]]:
        """Parameters that differ in the number of their layer alone, as one."""
        folded: dict[tuple[str, str, bool], list[ParameterUpdates]] = {}
        for one in self.parameters:
            name = re.sub(r"(^|\.)\d+(?=\.)", r"\1*", one.name)
            folded.setdefault((name, one.dtype, one.has_master), []).append(one)
        for (name, *_), ones in folded.items():
            yield (name if len(ones) > 1 else ones[0].name), ones


def check_training(model: nn.Module, optimizer: Optimizer) -> TrainingCheck:
    """Say, before training, which parameters have no FP32 masters and what share of their updates would be lost.

    An update is lost that is smaller than half a unit in the last place of its weight: for a BF16 weight, 2^-9 of it,
    or less. Nothing is changed, and no forward runs. Up to 32,768 elements of each parameter are looked at, half of
    them as growing and half as shrinking.

    The size of an update is taken to be the learning rate, which is that of Adam's and Lion's first one; later ones are
    smaller, so that more are lost. With SGD it is the learning rate times the gradient: call this after a backward.
    Where an LR scheduler has begun at 0, the ``initial_lr`` that it keeps counts. Optimizers with more bits of their
    own (Kahan summation, stochastic rounding) lose less than this says.

    Args:
        model: any module, attached or not; sharded by FSDP2, each process tells of its part.
        optimizer: over its parameters; torch's, accelerate's around it, or a :class:`hf_mp.MasterWeightOptimizer`.

    Returns:
        A :class:`TrainingCheck` with ``without_masters``, ``lost_share`` and ``advice``; ``print`` shows a table.

    Raises:
        TypeError: for anything but a module and an optimizer.
        ValueError: if no parameter of the optimizer belongs to the model, and for one without values (``meta``).
    """
    if not isinstance(model, nn.Module) or not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"check_training takes a model and its optimizer, not {type(model).__name__} and "
            f"{type(optimizer).__name__}: with a Trainer, trainer.model and trainer.create_optimizer()"
        )
    if (accelerated := as_accelerated(optimizer)) is not None:
        optimizer = accelerated.optimizer
    groups = {id(parameter): group for group in optimizer.param_groups for parameter in group["params"]}
    named = [(name, one) for name, one in model.named_parameters() if id(one) in groups and one.requires_grad]
    if not named:
        raise ValueError(
            f"no trainable parameter of this {type(model).__name__} is in the {type(optimizer).__name__}: make the "
            "optimizer from model.parameters()"
        )
    found = tuple(_look_at(name, parameter, groups[id(parameter)], optimizer) for name, parameter in named)
    rates = [rate for _, one in named if (rate := _learning_rate(groups[id(one)])) is not None]
    return TrainingCheck(found, max(rates, default=None))


@torch.no_grad()
def lost_share(weight: Tensor, update: Tensor) -> float:
    """The share of updates that rounding drops: ``weight - update`` is ``weight`` again.

    Args:
        weight: FP16, BF16 or FP32.
        update: floating, of the same shape; elements where it is 0 do not count.

    Returns:
        Between 0 and 1; 0 where nothing counts.
    """
    is_lost = (weight.double() - update.double()).to(weight.dtype) == weight
    counts = update != 0
    return float((is_lost & counts).sum() / counts.sum().clamp(min=1))


@torch.no_grad()
def _look_at(name: str, parameter: nn.Parameter, group: dict[str, Any], optimizer: Optimizer) -> ParameterUpdates:
    is_narrow = parameter.dtype in LOWER_PRECISION_DTYPES
    has_master = not is_narrow or isinstance(parameter, SplitParameter) or getattr(optimizer, "keeps_masters", False)
    if parameter.is_meta:
        raise ValueError(f"{name} is on the meta device, without values: load the weights first")
    local = local_part(parameter)
    values = sample(local)
    updates = _updates(values, parameter, group, optimizer)
    if has_master:
        values = values.float()
    shares = [lost_share(values, update) for update in updates]
    share = sum(shares) / len(shares) if shares else None
    return ParameterUpdates(name, str(parameter.dtype).removeprefix("torch."), local.numel(), has_master, share)


def _updates(values: Tensor, parameter: nn.Parameter, group: dict[str, Any], optimizer: Optimizer) -> list[Tensor]:
    """What may be subtracted from the sampled ``values``, each equally likely; none where that is not known."""
    rate = _learning_rate(group)
    if rate is None:
        return []
    if not isinstance(getattr(optimizer, "optimizer", optimizer), SGD):
        size = torch.full_like(values, rate, dtype=torch.float64)
        return [size, -size]
    gradient, factor = gradient_and_factor(parameter)
    if gradient is None or gradient.is_sparse:
        return []
    return [sample(local_part(gradient)).double() * (rate if factor is None else rate * factor.item())]


def _learning_rate(group: dict[str, Any]) -> float | None:
    """The larger of the one now and the one that an LR scheduler keeps; None where the optimizer finds its own."""
    rates = [group[key] for key in ("lr", "initial_lr") if group.get(key) is not None]
    return max(map(float, rates), default=None)


def _share(parameters: Sequence[ParameterUpdates]) -> float | None:
    known = [(one.lost_share, one.elements) for one in parameters if one.lost_share is not None]
    elements = sum(count for _, count in known)
    return sum(share * count for share, count in known) / elements if elements else None
