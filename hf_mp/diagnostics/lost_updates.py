"""Which parameters have no FP32 master, and what share of their updates rounding would drop: told before training."""

from __future__ import annotations

import contextlib
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from hf_mp.diagnostics.contract.risks import Evidence, Held, Risk, find_risks, lost_share, role_of
from hf_mp.diagnostics.magnitudes import sample
from hf_mp.policy import LOWER_PRECISION_DTYPES, spell
from hf_mp.weights.accelerated import as_accelerated
from hf_mp.weights.lean.split_parameter import SplitParameter, gradient_and_factor
from hf_mp.weights.ranks.placement import local_part


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
        risks: what loses bits, each a :class:`Risk` that says what to do.
    """

    parameters: tuple[ParameterUpdates, ...]
    learning_rate: float | None
    risks: tuple[Risk, ...] = ()

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
        """The risks and what to do; empty where there are none."""
        return "\n".join(map(str, self.risks))

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
    Where an LR scheduler has begun at 0, the ``initial_lr`` that it keeps counts. An optimizer with more bits of its
    own (Kahan sums, stochastic rounding) is recognized by what it does to small updates, and is no risk. Moments that
    are there are looked at, too.

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
    rate = max(rates, default=None)
    return TrainingCheck(found, rate, find_risks(_evidence(found, dict(named), groups, optimizer, rate)))


@torch.no_grad()
def _evidence(
    found: Sequence[ParameterUpdates],
    named: Mapping[str, nn.Parameter],
    groups: Mapping[int, dict[str, Any]],
    optimizer: Any,
    rate: float | None,
) -> Evidence:
    betas = [one["betas"][1] for one in groups.values() if len(one.get("betas") or ()) > 1]
    evidence = Evidence(learning_rate=rate, beta2=float(min(betas, default=0.999)), is_training=True)
    state = getattr(optimizer, "optimizer", optimizer).state
    for one in found:
        parameter = named[one.name]
        dtype = torch.float32 if one.has_master else parameter.dtype
        evidence.weights.append(Held(one.name, dtype, one.elements, sample(local_part(parameter)), one.lost_share))
        for key, value in state.get(parameter, {}).items():
            if isinstance(value, Tensor) and value.is_floating_point() and (role := role_of(key)) is not None:
                local = local_part(value)
                getattr(evidence, role).append(Held(f"{one.name}.{key}", value.dtype, local.numel(), sample(local)))
    evidence.keeps_bits = not all(one.has_master for one in found) and keeps_small_updates(optimizer)
    return evidence


def keeps_small_updates(optimizer: Any) -> bool:
    """Whether an optimizer keeps by its own means, Kahan sums or stochastic rounding, what rounding drops.

    It is tried on a BF16 weight of ones and 256 updates of 2^-16, in a copy that shares no state with ``optimizer``.
    False also where it does not step on a weight of its own making.
    """
    group = optimizer.param_groups[0]
    weight = nn.Parameter(torch.ones(32, 32, dtype=torch.bfloat16, device=local_part(group["params"][0]).device))
    rate = torch.tensor(2.0**-16) if isinstance(group.get("lr"), Tensor) else 2.0**-16
    trial = object.__new__(type(optimizer))
    vars(trial).update({key: value for key, value in vars(optimizer).items() if key != "step" and "_hooks" not in key})
    for hooks in (key for key in vars(optimizer) if "_hooks" in key):
        vars(trial)[hooks] = type(vars(optimizer)[hooks])()
    trial.state = defaultdict(dict)
    trial.param_groups = [{**group, "params": [weight], "lr": rate, "weight_decay": 0.0}]
    with torch.random.fork_rng(), contextlib.suppress(Exception):  # made for other weights: then it is not known to
        for _ in range(256):
            weight.grad = torch.ones_like(weight)
            type(optimizer).step(trial)
    return bool((weight != 1.0).any())


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
