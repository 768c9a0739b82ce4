"""``check_training``: finds parameters without FP32 masters, and the share of updates that they would lose."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from hf_mp.diagnostics.contract.lost_update_count import share_lost_at
from hf_mp.diagnostics.contract.risks import (
    Evidence,
    Risk,
    TensorSample,
    beta2_of,
    find_risks,
    learning_rate_of,
    mean,
    role_of,
)
from hf_mp.diagnostics.magnitudes import sample
from hf_mp.dtypes import LOWER_PRECISION_DTYPES
from hf_mp.integrations.accelerated import as_accelerated
from hf_mp.ranks.parallelism import local_part
from hf_mp.weights.split_parameter import SplitParameter

# Settings that keep small updates: optimi kahan_sum, torchao bf16_stochastic_round.
_KEEPS_BITS = re.compile("kahan|stochastic")


@dataclass(frozen=True)
class TrainingCheck:
    """Result of :func:`check_training`; prints as sentences.

    Attributes:
        parameters: one entry for each updated parameter, in the model's order; ``dtype`` is that of the updated value.
        learning_rate: the largest; None if none is above 0.
        risks: each :class:`Risk`, with advice.
        keeps_bits: whether the optimizer keeps small updates, by Kahan sums or stochastic rounding.
    """

    parameters: tuple[TensorSample, ...]
    learning_rate: float | None
    risks: tuple[Risk, ...] = ()
    keeps_bits: bool = False

    @property
    def without_masters(self) -> tuple[str, ...]:
        """Names of the parameters updated in FP16 or BF16."""
        return tuple(one.name for one in self.parameters if one.dtype in LOWER_PRECISION_DTYPES)

    @property
    def lost_share(self) -> float | None:
        """Share of lost updates, from 0 to 1; None if the learning rate does not determine the size of updates."""
        measured = [(one.elements, one.lost_share) for one in self.parameters if one.lost_share is not None]
        return mean(measured) if measured else None

    @property
    def advice(self) -> str:
        return "\n".join(map(str, self.risks))

    def __str__(self) -> str:
        masters = (
            f"{len(self.without_masters)} of {len(self.parameters)} trained parameters have no FP32 master"
            if self.without_masters
            else f"all {len(self.parameters)} trained parameters are FP32 or have FP32 masters"
        )
        lost = "how many of their updates would be lost is not known"
        if self.lost_share is not None:
            lost = f"{self.lost_share:.1%} of all updates would be lost"
        if self.keeps_bits:
            lost = "the optimizer keeps small updates itself"
        return "\n".join((f"{masters}, and {lost}", *map(str, self.risks)))


def check_training(model: nn.Module, optimizer: Optimizer) -> TrainingCheck:
    """Find, before training, the parameters without FP32 masters and the share of their updates that would be lost.

    An update is lost if it is smaller than half a unit in the last place of its weight: a BF16 weight loses all updates
    below 2^-9 of its size. No forward runs. Up to 32,768 elements of each parameter are examined, and the dtype of
    moments.

    The size of an update is assumed to be the learning rate, as of Adam's and Lion's first update; later ones are
    smaller, so more are lost. That of SGD's updates is unknown. If an LR scheduler has begun at 0, its
    ``initial_lr`` counts. An optimizer with "kahan" or "stochastic" in the names of its settings or state keeps small
    updates.

    Args:
        model: any module, attached or not; under FSDP2, each process reports on its shards.
        optimizer: torch's, accelerate's around it, or a :class:`hf_mp.MasterWeightOptimizer`.

    Returns:
        A :class:`TrainingCheck`.

    Raises:
        TypeError: for anything but a module and an optimizer.
        ValueError: if no parameter of the optimizer belongs to the model.
    """
    optimizer, trained = _trained_parameters(model, optimizer)
    groups = [group for _, _, group in trained]
    keeps_bits = _keeps_small_updates(_inner_optimizer(optimizer))
    evidence = Evidence(
        learning_rate=learning_rate_of(groups) or None,
        beta2=beta2_of(groups),
        keeps_bits=keeps_bits,
        is_training=True,
    )
    for name, parameter, group in trained:
        _add_evidence(name, parameter, group, optimizer, evidence)
    return TrainingCheck(tuple(evidence.weights), evidence.learning_rate, find_risks(evidence), keeps_bits)


def _inner_optimizer(optimizer: Any) -> Any:
    """Return the optimizer inside a MasterWeightOptimizer, or ``optimizer``."""
    return getattr(optimizer, "optimizer", optimizer)


def _keeps_small_updates(optimizer: Any) -> bool:
    # optimi: kahan_sum=None means True for 16-bit weights, and an unused state has no tensor.
    state = {name: isinstance(value, Tensor) for name, value in next(iter(optimizer.state.values()), {}).items()}
    settings = {name: value is not False for name, value in {**vars(optimizer), **optimizer.defaults}.items()}
    return any(is_used for name, is_used in {**state, **settings}.items() if _KEEPS_BITS.search(name))


def _trained_parameters(model: Any, optimizer: Any) -> tuple[Optimizer, list[tuple[str, nn.Parameter, dict[str, Any]]]]:
    """Return the optimizer without accelerate's wrapper, and its parameters with name and group."""
    if not isinstance(model, nn.Module) or not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"check_training takes a model and its optimizer, not {type(model).__name__} and "
            f"{type(optimizer).__name__}: with a Trainer, trainer.model and trainer.create_optimizer()"
        )
    optimizer = getattr(as_accelerated(optimizer), "optimizer", optimizer)
    groups = {id(parameter): group for group in optimizer.param_groups for parameter in group["params"]}
    trained = [
        (name, one, groups[id(one)])
        for name, one in model.named_parameters()
        if id(one) in groups and one.requires_grad
    ]
    if not trained:
        raise ValueError(
            f"no trainable parameter of this {type(model).__name__} is in the {type(optimizer).__name__}: make the "
            "optimizer from model.parameters()"
        )
    return optimizer, trained


def _add_evidence(
    name: str, parameter: nn.Parameter, group: dict[str, Any], optimizer: Any, evidence: Evidence
) -> None:
    inner, rate = _inner_optimizer(optimizer), learning_rate_of([group])
    local = local_part(parameter.detach())
    values = sample(local)
    if isinstance(parameter, SplitParameter) or getattr(optimizer, "keeps_masters", False):
        values = values.float()  # the master is FP32
    lost_share = 0.0 if evidence.keeps_bits else None
    if lost_share is None and rate is not None and not isinstance(inner, SGD):
        lost_share = share_lost_at(values, rate)
    evidence.weights.append(TensorSample(name, values.dtype, local.numel(), values, lost_share))
    for key, value in inner.state.get(parameter, {}).items():
        role = role_of(key)
        if role is not None and isinstance(value, Tensor) and value.is_floating_point():
            local = local_part(value)
            getattr(evidence, role).append(TensorSample(f"{name}.{key}", value.dtype, local.numel(), sample(local)))
