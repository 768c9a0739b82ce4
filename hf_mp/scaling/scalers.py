"""Loss scalers and their factory, :func:`make_loss_scaler`."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from inspect import signature
from typing import Any

import torch

from hf_mp.dtypes import compute_dtype
from hf_mp.scaling.loss_scaler import LossScaleError, LossScaler
from hf_mp.scaling.rules import (
    FP16_MAX,
    LARGEST_SCALE,
    LEAST_USEFUL_SCALE,
    RULES,
    DynamicRule,
    HeadroomRule,
    ScaleRule,
    StaticRule,
    number,
    parse_loss_scale,
)

__all__ = [
    "DynamicLossScaler", "HeadroomLossScaler", "LossScaleError", "LossScaler", "StaticLossScaler",
    "make_loss_scaler",
]  # fmt: skip

OF_ALL_SCALERS = {"max_consecutive_skips", "enabled"}  # settings of every scaler


class StaticLossScaler(LossScaler[StaticRule]):
    """A constant loss scale (Micikevicius et al. 2017, section 3.2); steps with an overflow are skipped.

    Args:
        scale: the loss scale; scaling is exact for a power of two. 1 means no scaling.
        max_consecutive_skips: skipped steps in a row after which :class:`LossScaleError` is raised; default 50.
        enabled: False disables scaling and skipping; default True.

    Raises:
        ValueError: for a scale that is not positive and finite.
    """

    def __init__(self, scale: float, *, max_consecutive_skips: int = 50, enabled: bool = True) -> None:
        super().__init__(StaticRule(scale), max_consecutive_skips=max_consecutive_skips, enabled=enabled)


class DynamicLossScaler(LossScaler[DynamicRule]):
    """The dynamic loss scale of ``torch.amp.GradScaler``: halved on an overflow, doubled after clean steps.

    Micikevicius et al. 2017, section 3.2.

    Algorithm::

        overflow:  scale *= backoff_factor; tracker = 0
        clean:     tracker += 1
                   if tracker == growth_interval: scale *= growth_factor; tracker = 0

    Args:
        device: unused; for compatibility with ``torch.amp.GradScaler``. Default None.
        init_scale: scale of the first step; default 2**16.
        growth_factor: at least 1, which means no growth; default 2.
        backoff_factor: below 1; default 0.5.
        growth_interval: clean steps before the scale grows; default 2000.
        hysteresis: overflows before the scale is lowered; default 1: at once. Further overflows lower it too. The count
            is restored when the scale grows, as in Megatron-LM (``--hysteresis``) and DeepSpeed.
        consecutive_hysteresis: restore the count at a clean step too, as DeepSpeed's setting of that name and NeMo's
            scaler do; default False.
        growth_delay: clean steps that do not count towards growth, at the beginning and after each overflow; default 0.
            1 gives the growth steps of DeepSpeed.
        min_scale: lower bound; default 2**-48, where FP16's largest number is an unscaled gradient of 2**64, with which
            every step is skipped. 0 means FP32's bound, 2**-126.
        max_scale: upper bound of growth; default None: FP32's.
        max_consecutive_skips: skipped steps in a row at ``min_scale`` after which :class:`LossScaleError` is raised;
            default 50.
        enabled: False disables scaling and skipping; default True.

    A factor or scale that is not a power of two costs a warning, because scaling then rounds. A ``backoff_factor`` of 0
    or less lowers the scale to ``min_scale``; torch's scale would become 0 or negative.

    Raises:
        ValueError: for settings out of range.
        TypeError: if ``device`` is a number.
    """

    def __init__(
        self,
        device: str | torch.device | None = None,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        hysteresis: int = 1,
        consecutive_hysteresis: bool = False,
        growth_delay: int = 0,
        min_scale: float = LEAST_USEFUL_SCALE,
        max_scale: float | None = None,
        max_consecutive_skips: int = 50,
    ) -> None:
        if isinstance(device, (int, float)):  # StaticLossScaler's argument
            raise TypeError(f"device={device!r} is no device: write init_scale={device!r}, if that is the scale")
        rule = DynamicRule(
            init_scale,
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            growth_interval=growth_interval,
            hysteresis=hysteresis,
            consecutive_hysteresis=consecutive_hysteresis,
            growth_delay=growth_delay,
            min_scale=min_scale,
            max_scale=math.inf if max_scale is None else max_scale,
        )
        rule.validated()  # before growth_delay is negated
        rule = replace(rule, growth_tracker=-growth_delay, hysteresis_left=hysteresis)
        super().__init__(rule, max_consecutive_skips=max_consecutive_skips, enabled=enabled)

    def get_growth_factor(self) -> float:
        return self._state.growth_factor

    def set_growth_factor(self, new_factor: float) -> None:
        """Set the factor by which the scale grows; at least 1."""
        self._set_checked(replace(self._state, growth_factor=new_factor))

    def get_backoff_factor(self) -> float:
        return self._state.backoff_factor

    def set_backoff_factor(self, new_factor: float) -> None:
        """Set the factor by which an overflow lowers the scale; below 1."""
        self._set_checked(replace(self._state, backoff_factor=new_factor))

    def get_growth_interval(self) -> int:
        return self._state.growth_interval

    def set_growth_interval(self, new_interval: int) -> None:
        """Set the number of clean steps before the scale grows; at least 1.

        After ``new_interval`` or more clean steps, the scale grows at the next one; torch's not until an overflow.
        """
        self._set_checked(replace(self._state, growth_interval=new_interval))


class HeadroomLossScaler(LossScaler[HeadroomRule]):
    """A loss scale computed from the largest gradient, instead of raised until an overflow.

    The scale times the largest gradient stays below 65504 (Micikevicius et al. 2017, section 3.2; NVIDIA's "Train With
    Mixed Precision" guide). The headroom adapts to the gradients: :class:`~hf_mp.scaling.rules.HeadroomRule` has the
    algorithm.

    After an overflow the scale is far too low for one step, and the gradient of that step shows the cause. If it is
    larger than the level, the gradients have grown. Otherwise the cause was a single spike, an activation gradient
    larger than any weight gradient, or data that overflow at any scale.

    Args:
        init_scale: scale of the first step; low, because no gradient was measured; default 2**10.
        headroom: smallest initial headroom, in doublings between the level and FP16's largest number; default 5. It
            sinks to 1 if gradients need no more.
        half_life: steps in which the level moves half the way to a new one; default 25.
        backoff_factor: factor on an overflow; default 2**-20.
        patience: steps in which a headroom below 4.5 sinks by one doubling while no step is skipped; default 250.
        min_scale: lower bound; default 2**-48, as for :class:`DynamicLossScaler`. 0 means FP32's bound.
        max_scale: upper bound; default 2**40; None means FP32's.
        largest: largest number of the dtype of the gradients; default FP16's, 65504.
        max_consecutive_skips: skipped steps in a row at ``min_scale`` after which :class:`LossScaleError` is raised;
            default 50.
        enabled: False disables scaling and skipping; default True.

    After the first update the scale is a power of two. Other bounds are moved inwards to the nearest power of two.

    Raises:
        ValueError: for settings out of range.
    """

    def __init__(
        self,
        init_scale: float = 2.0**10,
        headroom: float = 5.0,
        half_life: float = 25,
        *,
        backoff_factor: float = 2.0**-20,
        patience: int = 250,
        min_scale: float = LEAST_USEFUL_SCALE,
        max_scale: float | None = 2.0**40,
        largest: float = FP16_MAX,
        max_consecutive_skips: int = 50,
        enabled: bool = True,
    ) -> None:
        number("0 to 30 doublings (FP16 has 40 in all)", lambda x: 0.0 <= x <= 30.0)(headroom=headroom)
        rule = HeadroomRule(
            init_scale,
            headroom=headroom,
            init_scale=init_scale,
            init_headroom=headroom,
            half_life=half_life,
            backoff_factor=backoff_factor,
            patience=patience,
            min_scale=min_scale,
            max_scale=LARGEST_SCALE if max_scale is None else max_scale,
            largest=largest,
        )
        super().__init__(rule, max_consecutive_skips=max_consecutive_skips, enabled=enabled)


_SCALERS: dict[str, type[LossScaler[Any]]] = {
    StaticRule.name: StaticLossScaler,
    DynamicRule.name: DynamicLossScaler,
    HeadroomRule.name: HeadroomLossScaler,
}


def make_loss_scaler(
    loss_scale: str | float | None, compute: torch.dtype = torch.float16, /, **settings: Any
) -> LossScaler[Any]:
    """Return the scaler for the ``loss_scale`` of a policy.

    Args:
        loss_scale: a name of ``RULES``, a number, or None for a scale of 1, with which overflows are still skipped.
        compute: dtype of the gradients; its largest number, FP16's at most, is the limit of the headroom rule.
        settings: settings of the rule, ``max_consecutive_skips`` and ``enabled``.

    Raises:
        ValueError: for another loss scale or setting.
    """
    kind = parse_loss_scale(loss_scale)
    rule = RULES[kind] if isinstance(kind, str) else StaticRule
    scaler = _SCALERS.get(rule.name)  # None for a rule that user code has registered
    allowed = _allowed_settings(rule, scaler)
    if unknown := sorted(settings.keys() - allowed):
        raise ValueError(
            f"the {rule.name!r} loss scaler has no setting {', '.join(unknown)}: it has {', '.join(sorted(allowed))}"
        )
    if scaler is None:
        of_all = {name: settings.pop(name) for name in OF_ALL_SCALERS & settings.keys()}
        return LossScaler(rule(**settings), **of_all)
    if kind == HeadroomRule.name:
        settings.setdefault("largest", min(compute_dtype(compute).largest, FP16_MAX))
    if isinstance(kind, str):
        return scaler(**settings)
    return scaler(1.0 if kind is None else kind, **settings)


def _allowed_settings(rule: type[ScaleRule], scaler: type[LossScaler[Any]] | None) -> set[str]:
    """Return the names of the settings of ``scaler``, or if it is None, of ``rule``."""
    if scaler is not None:
        return set(signature(scaler).parameters) - {"scale", "device"}
    return {field.name for field in fields(rule) if field.kw_only} | {"scale", *OF_ALL_SCALERS}
