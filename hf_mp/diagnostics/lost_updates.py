"""Which parameters have no FP32 master, and what share of their updates rounding would drop: told before training."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from hf_mp.diagnostics.contract.risks import (
    Evidence,
    Held,
    Risk,
    beta2_of,
    find_risks,
    learning_rate_of,
    lost_share,
    mean,
    role_of,
    share_lost_at,
)
from hf_mp.diagnostics.magnitudes import sample
from hf_mp.policy import LOWER_PRECISION_DTYPES
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
        lost_share: share of updates that leave their element as it is, bit for bit; 0 where the optimizer keeps them
            itself, None where the size of an update is not known.
    """

    name: str
    dtype: str
    elements: int
    has_master: bool
    lost_share: float | None


@dataclass(frozen=True)
class TrainingCheck:
    """What :func:`check_training` found; prints as sentences.

    Attributes:
        parameters: those that the optimizer updates, in the order of the model.
        learning_rate: the largest of the optimizer's groups.
        risks: what loses bits, each a :class:`Risk` that says what to do.
        keeps_bits: whether the optimizer keeps small updates without masters, by Kahan sums or stochastic rounding.
    """

    parameters: tuple[ParameterUpdates, ...]
    learning_rate: float | None
    risks: tuple[Risk, ...] = ()
    keeps_bits: bool = False

    @property
    def without_masters(self) -> tuple[str, ...]:
        """The names of the parameters that are updated in FP16 or BF16."""
        return tuple(one.name for one in self.parameters if not one.has_master)

    @property
    def lost_share(self) -> float | None:
        """The share of all updates whose size is known that would be lost; None where none is."""
        known = [(one.elements, one.lost_share) for one in self.parameters if one.lost_share is not None]
        return mean(known) if known else None

    @property
    def advice(self) -> str:
        """The risks and what to do; empty where there are none."""
        return "\n".join(map(str, self.risks))

    def __str__(self) -> str:
        masters = f"all {len(self.parameters)} trained parameters are FP32 or have FP32 masters"
        if self.without_masters:
            masters = f"{len(self.without_masters)} of {len(self.parameters)} trained parameters have no FP32 master"
        lost = "how many of their updates would be lost is not known: call this after a backward"
        if self.lost_share is not None:
            lost = f"{self.lost_share:.1%} of all updates would be lost"
        if self.keeps_bits:
            lost = "the optimizer keeps small updates itself"
        return "\n".join((f"{masters}, and {lost}", *map(str, self.risks)))


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
        A :class:`TrainingCheck` with ``without_masters``, ``lost_share`` and ``advice``; ``print`` shows them.

    Raises:
        TypeError: for anything but a module and an optimizer.
        ValueError: if no parameter of the optimizer belongs to the model, and for one without values (``meta``).
    """
    optimizer, trained = _trained(model, optimizer)
    evidence = Evidence(beta2=beta2_of(group for _, _, group in trained), is_training=True)
    evidence.learning_rate = max(filter(None, (learning_rate_of(group) for _, _, group in trained)), default=None)
    found = tuple(_look_at(*one, optimizer, evidence) for one in trained)
    evidence.keeps_bits = not all(one.has_master for one in found) and keeps_small_updates(optimizer)
    if evidence.keeps_bits:
        found = tuple(one if one.has_master else replace(one, lost_share=0.0) for one in found)
    return TrainingCheck(found, evidence.learning_rate, find_risks(evidence), evidence.keeps_bits)


def _trained(model: Any, optimizer: Any) -> tuple[Optimizer, list[tuple[str, nn.Parameter, dict[str, Any]]]]:
    """The optimizer itself, and its parameters in the model, each with its name and group."""
    if not isinstance(model, nn.Module) or not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"check_training takes a model and its optimizer, not {type(model).__name__} and "
            f"{type(optimizer).__name__}: with a Trainer, trainer.model and trainer.create_optimizer()"
        )
    # accelerate's wrapper has a step of its own, which a trial must not run.
    optimizer = getattr(as_accelerated(optimizer), "optimizer", optimizer)
    groups = {id(parameter): group for group in optimizer.param_groups for parameter in group["params"]}
    named = [(name, one) for name, one in model.named_parameters() if id(one) in groups and one.requires_grad]
    if not named:
        raise ValueError(
            f"no trainable parameter of this {type(model).__name__} is in the {type(optimizer).__name__}: make the "
            "optimizer from model.parameters()"
        )
    return optimizer, [(name, one, groups[id(one)]) for name, one in named]


def keeps_small_updates(optimizer: Any) -> bool:
    """Whether an optimizer keeps by its own means, Kahan sums or stochastic rounding, what rounding drops.

    It is tried on a BF16 weight of ones and 256 updates of 2^-16, in a copy that shares no state with ``optimizer``.
    False also where it does not step on a weight of its own making.
    """
    group = optimizer.param_groups[0]
    # 256 updates of 2^-16 are one unit in the last place of 1: kept, they show; each by itself, it is rounded away.
    weight = nn.Parameter(torch.ones(32, 32, dtype=torch.bfloat16, device=local_part(group["params"][0]).device))
    rate = torch.tensor(2.0**-16) if isinstance(group.get("lr"), Tensor) else 2.0**-16
    # Its class and settings without its state: a deep copy would hold a second set of moments.
    trial = object.__new__(type(optimizer))
    for key, value in vars(optimizer).items():
        if key != "step":  # which a scheduler or an attached model has put its own around
            vars(trial)[key] = type(value)() if "_hooks" in key else value
    trial.state = defaultdict(dict)
    trial.param_groups = [{**group, "params": [weight], "lr": rate, "weight_decay": 0.0}]
    with torch.random.fork_rng(), contextlib.suppress(Exception):  # made for other weights: then it is not known to
        for _ in range(256):
            weight.grad = torch.ones_like(weight)
            type(optimizer).step(trial)
    return bool((weight != 1.0).any())


@torch.no_grad()
def _look_at(
    name: str, parameter: nn.Parameter, group: dict[str, Any], optimizer: Any, evidence: Evidence
) -> ParameterUpdates:
    """What is said of a parameter; its tensors are added to ``evidence``."""
    if parameter.is_meta:
        raise ValueError(f"{name} is on the meta device, without values: load the weights first")
    is_narrow, local = parameter.dtype in LOWER_PRECISION_DTYPES, local_part(parameter)
    has_master = not is_narrow or isinstance(parameter, SplitParameter) or getattr(optimizer, "keeps_masters", False)
    # A lean parameter's 16 bits say nothing of its master, which is FP32.
    values = sample(local).float() if has_master else sample(local)
    # Of a MasterWeightOptimizer, the optimizer inside has the moments, and says whether it is SGD.
    inner = getattr(optimizer, "optimizer", optimizer)
    lost = _lost(values, parameter, learning_rate_of(group), is_sgd=isinstance(inner, SGD))
    evidence.weights.append(Held(name, values.dtype, local.numel(), values, lost))
    for key, value in inner.state.get(parameter, {}).items():
        if isinstance(value, Tensor) and value.is_floating_point() and (role := role_of(key)) is not None:
            held = Held(f"{name}.{key}", value.dtype, local_part(value).numel(), sample(local_part(value)))
            getattr(evidence, role).append(held)
    return ParameterUpdates(name, str(parameter.dtype).removeprefix("torch."), local.numel(), has_master, lost)


def _lost(values: Tensor, parameter: nn.Parameter, rate: float | None, *, is_sgd: bool) -> float | None:
    """The share of updates of the sampled ``values`` that is lost; None where their size is not known."""
    if rate is None or not is_sgd:
        return None if rate is None else share_lost_at(values, rate)
    gradient, factor = gradient_and_factor(parameter)
    if gradient is None or gradient.is_sparse:
        return None
    return lost_share(
        values, sample(local_part(gradient)).double() * (rate if factor is None else rate * factor.item())
    )
