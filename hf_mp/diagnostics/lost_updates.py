"""Which parameters have no FP32 master, and what share of their updates rounding would drop: told before training."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from hf_mp.diagnostics.contract.risks import Evidence, Held, Risk, beta2_of, find_risks, learning_rate_of, mean, role_of
from hf_mp.diagnostics.contract.swamped import share_lost_at
from hf_mp.diagnostics.magnitudes import sample
from hf_mp.dtypes import LOWER_PRECISION_DTYPES
from hf_mp.integrations.accelerated import as_accelerated
from hf_mp.ranks.parallelism import local_part
from hf_mp.weights.split_parameter import SplitParameter

# What optimizers call their own way to keep small updates: optimi kahan_sum, torchao bf16_stochastic_round.
_KEEPS_BITS = re.compile("kahan|stochastic")


@dataclass(frozen=True)
class TrainingCheck:
    """What :func:`check_training` found; prints as sentences.

    Attributes:
        parameters: one entry for each parameter that the optimizer updates, in the model's order: the dtype in which
            its updates are added up, and, as ``lost_share``, the share of its updates that change no bit.
        learning_rate: the largest of the optimizer's groups.
        risks: what loses bits, each a :class:`Risk` that says what to do.
        keeps_bits: whether the optimizer keeps small updates without masters, by Kahan sums or stochastic rounding.
    """

    parameters: tuple[Held, ...]
    learning_rate: float | None
    risks: tuple[Risk, ...] = ()
    keeps_bits: bool = False

    @property
    def without_masters(self) -> tuple[str, ...]:
        """The names of the parameters that are updated in FP16 or BF16."""
        return tuple(one.name for one in self.parameters if one.dtype in LOWER_PRECISION_DTYPES)

    @property
    def lost_share(self) -> float | None:
        """The share of updates that would be lost, among those whose size is known; None if no size is known."""
        known = [(one.elements, one.lost_share) for one in self.parameters if one.lost_share is not None]
        return mean(known) if known else None

    @property
    def advice(self) -> str:
        """The risks and what to do; empty if there are none."""
        return "\n".join(map(str, self.risks))

    def __str__(self) -> str:
        masters = f"all {len(self.parameters)} trained parameters are FP32 or have FP32 masters"
        if self.without_masters:
            masters = f"{len(self.without_masters)} of {len(self.parameters)} trained parameters have no FP32 master"
        lost = "how many of their updates would be lost is not known"
        if self.lost_share is not None:
            lost = f"{self.lost_share:.1%} of all updates would be lost"
        if self.keeps_bits:
            lost = "the optimizer keeps small updates itself"
        return "\n".join((f"{masters}, and {lost}", *map(str, self.risks)))


def check_training(model: nn.Module, optimizer: Optimizer) -> TrainingCheck:
    """Say, before training, which parameters have no FP32 masters and what share of their updates would be lost.

    An update is lost if it is smaller than half a unit in the last place of its weight: a BF16 weight loses all updates
    below 2^-9 of its size. Nothing is changed, and no forward runs. Up to 32,768 elements of each parameter are
    examined: half of them as if they grew, half as if they shrank.

    The size of an update is taken to be the learning rate. Adam's and Lion's first update has that size; later ones are
    smaller, so more of them are lost. SGD's size is not known. If an LR scheduler has begun at 0, its ``initial_lr``
    counts. An optimizer that keeps more bits itself is recognized by the names of its settings and its state ("kahan",
    "stochastic"), and is no risk. The dtype of moments is examined, too.

    Args:
        model: any module, attached or not; under FSDP2, each process reports on its shards.
        optimizer: over its parameters; torch's, accelerate's around it, or a :class:`hf_mp.MasterWeightOptimizer`.

    Returns:
        A :class:`TrainingCheck` with ``without_masters``, ``lost_share`` and ``advice``; ``print`` shows them.

    Raises:
        TypeError: for anything but a module and an optimizer.
        ValueError: if no parameter of the optimizer belongs to the model.
    """
    optimizer, trained = _trained(model, optimizer)
    groups = [group for _, _, group in trained]
    # Of a MasterWeightOptimizer, the optimizer inside has the settings and the moments, and says whether it is SGD.
    inner = getattr(optimizer, "optimizer", optimizer)
    # optimi's kahan_sum=None means True for 16-bit weights; without, its state has the name, and no tensor.
    held = {name: isinstance(value, Tensor) for name, value in next(iter(inner.state.values()), {}).items()}
    said = {name: value is not False for name, value in {**vars(inner), **inner.defaults}.items()}
    keeps_bits = any(holds for name, holds in {**held, **said}.items() if _KEEPS_BITS.search(name))
    evidence = Evidence(
        learning_rate=learning_rate_of(groups) or None,
        beta2=beta2_of(groups),
        keeps_bits=keeps_bits,
        is_training=True,
    )
    for name, parameter, group in trained:
        _add_evidence(name, parameter, group, optimizer, evidence)
    return TrainingCheck(tuple(evidence.weights), evidence.learning_rate, find_risks(evidence), keeps_bits)


def _trained(model: Any, optimizer: Any) -> tuple[Optimizer, list[tuple[str, nn.Parameter, dict[str, Any]]]]:
    """The optimizer itself, and its parameters in the model, each with its name and group."""
    if not isinstance(model, nn.Module) or not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"check_training takes a model and its optimizer, not {type(model).__name__} and "
            f"{type(optimizer).__name__}: with a Trainer, trainer.model and trainer.create_optimizer()"
        )
    # Neither the settings nor the state's own keys are at accelerate's wrapper.
    optimizer = getattr(as_accelerated(optimizer), "optimizer", optimizer)
    groups = {id(parameter): group for group in optimizer.param_groups for parameter in group["params"]}
    named = model.named_parameters()
    trained = [(name, one, groups[id(one)]) for name, one in named if id(one) in groups and one.requires_grad]
    if not trained:
        raise ValueError(
            f"no trainable parameter of this {type(model).__name__} is in the {type(optimizer).__name__}: make the "
            "optimizer from model.parameters()"
        )
    return optimizer, trained


def _add_evidence(
    name: str, parameter: nn.Parameter, group: dict[str, Any], optimizer: Any, evidence: Evidence
) -> None:
    """Add a parameter and its state to ``evidence``."""
    inner = getattr(optimizer, "optimizer", optimizer)
    local, rate = local_part(parameter.detach()), learning_rate_of([group])
    values = sample(local)
    if isinstance(parameter, SplitParameter) or getattr(optimizer, "keeps_masters", False):
        values = values.float()  # a lean parameter's 16 bits say nothing of its master, which is FP32
    lost = None if rate is None or isinstance(inner, SGD) else share_lost_at(values, rate)
    evidence.weights.append(Held(name, values.dtype, local.numel(), values, 0.0 if evidence.keeps_bits else lost))
    for key, value in inner.state.get(parameter, {}).items():
        if isinstance(value, Tensor) and value.is_floating_point() and (role := role_of(key)) is not None:
            local = local_part(value)
            getattr(evidence, role).append(Held(f"{name}.{key}", value.dtype, local.numel(), sample(local)))
