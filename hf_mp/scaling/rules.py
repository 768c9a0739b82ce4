"""The pure rules of loss scaling: functions of frozen values that turn what a step saw into the next scale.

They need no model, Trainer or GPU; :mod:`hf_mp.scaling.scalers` keeps their state.
"""

from __future__ import annotations

import ctypes
import math
import numbers
from dataclasses import dataclass, replace
from typing import TypeGuard, TypeVar

import torch

FP16_MAX = torch.finfo(torch.float16).max  # 65504
FP32_MAX = torch.finfo(torch.float32).max
SMALLEST_SCALE = 2.0**-126  # its inverse is finite in FP32
LARGEST_SCALE = 2.0**127


@dataclass(frozen=True)
class StepReport:
    """What one optimizer step saw.

    Attributes:
        overflow: whether a gradient was inf or NaN (or too large to be squared, where a :class:`MixedPrecision` looks),
            so that the update was not applied.
        largest_gradient: largest magnitude among the unscaled gradients before clipping; None if it was not measured.
    """

    overflow: bool
    largest_gradient: float | None = None


@dataclass(frozen=True)
class ScalerState:
    """What every scaler remembers between steps; its fields are its saved state.

    Attributes:
        scale: the loss scale in force, rounded to FP32, in which tensors hold it.
        steps: optimizer steps recorded, skipped ones included.
        skipped_steps: of those, the ones that were skipped.
        consecutive_skips: skipped steps since the last applied one.

    Raises:
        ValueError: for a scale that is none, or a counter that is no whole number.
    """

    scale: float
    steps: int = 0
    skipped_steps: int = 0
    consecutive_skips: int = 0

    def __post_init__(self) -> None:
        check_scale(self.scale)
        object.__setattr__(self, "scale", to_fp32(self.scale))
        check_whole(0, steps=self.steps, skipped_steps=self.skipped_steps, consecutive_skips=self.consecutive_skips)


State = TypeVar("State", bound=ScalerState)


def count_step(state: State, report: StepReport) -> State:
    """The state with the step counted; its scale is unchanged."""
    return replace(
        state,
        steps=state.steps + 1,
        skipped_steps=state.skipped_steps + report.overflow,
        consecutive_skips=state.consecutive_skips + 1 if report.overflow else 0,
    )


@dataclass(frozen=True)
class DynamicState(ScalerState):
    """What :class:`DynamicLossScaler` remembers besides.

    Attributes:
        growth_tracker: clean steps since the last overflow or growth.
        hysteresis_left: overflows until the scale is lowered, counting the one that lowers it.
    """

    growth_tracker: int = 0
    hysteresis_left: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole(0, growth_tracker=self.growth_tracker)
        check_whole(1, hysteresis_left=self.hysteresis_left)


@dataclass(frozen=True)
class DynamicSettings:
    """Settings of :func:`adjust_dynamic`; see :class:`DynamicLossScaler`."""

    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    hysteresis: int = 1
    min_scale: float = 1.0
    max_scale: float | None = None
    consecutive_hysteresis: bool = False

    def __post_init__(self) -> None:
        check_numbers(self)
        if not 1.0 < self.growth_factor < math.inf:
            raise ValueError(f"growth_factor={self.growth_factor} must be above 1.0 and finite")
        if not -math.inf < self.backoff_factor < 1.0:
            raise ValueError(f"backoff_factor={self.backoff_factor} must be below 1.0, so that an overflow lowers it")
        check_whole(1, growth_interval=self.growth_interval, hysteresis=self.hysteresis)
        check_bounds(self.min_scale, self.max_scale)


def adjust_dynamic(state: DynamicState, settings: DynamicSettings, report: StepReport) -> DynamicState:
    """One update of torch's algorithm (the documentation of ``torch.amp.GradScaler``), with bounds and hysteresis."""
    state = count_step(state, report)
    if report.overflow:
        if state.hysteresis_left > 1:
            return replace(state, growth_tracker=0, hysteresis_left=state.hysteresis_left - 1)
        # A scale that is below the floor already, because it was set there, stays.
        lowered = max(state.scale * settings.backoff_factor, min(settings.min_scale, state.scale))
        return replace(state, scale=lowered, growth_tracker=0)
    if settings.consecutive_hysteresis:
        state = replace(state, hysteresis_left=settings.hysteresis)
    tracker = state.growth_tracker + 1
    if tracker < settings.growth_interval:
        return replace(state, growth_tracker=tracker)
    grown = to_fp32(state.scale * settings.growth_factor)
    if not math.isfinite(grown):  # torch keeps a scale that would leave FP32
        grown = state.scale
    if settings.max_scale is not None:
        grown = min(grown, max(settings.max_scale, state.scale))
    return replace(state, scale=grown, growth_tracker=0, hysteresis_left=settings.hysteresis)


@dataclass(frozen=True)
class HeadroomState(ScalerState):
    """What :class:`HeadroomLossScaler` remembers besides.

    Attributes:
        peak: decaying maximum of the largest unscaled gradient magnitude; None until a finite one was seen.
        ceiling: the scale may not exceed this since an overflow; None if there was none.
        clean_steps: applied steps since the ceiling last changed.
    """

    peak: float | None = None
    ceiling: float | None = None
    clean_steps: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole(0, clean_steps=self.clean_steps)
        for name, value in (("peak", self.peak), ("ceiling", self.ceiling)):
            if value is not None and not (_is_real(value) and 0.0 < value < math.inf):
                raise ValueError(f"{name}={value!r} must be a positive, finite number or None")


@dataclass(frozen=True)
class HeadroomSettings:
    """Settings of :func:`adjust_headroom`; see :class:`HeadroomLossScaler`."""

    headroom: float = 6.0
    half_life: int = 100
    backoff_factor: float = 0.5
    calibration_backoff_factor: float = 2.0**-4
    ceiling_interval: int = 2000
    min_scale: float = 2.0**-14
    max_scale: float | None = 2.0**40

    def __post_init__(self) -> None:
        check_numbers(self)
        if not 0.0 <= self.headroom <= 30.0:
            raise ValueError(f"headroom={self.headroom} must be 0 to 30 doublings (FP16 has 40 in all)")
        if not 1 <= self.half_life < math.inf:
            raise ValueError(f"half_life={self.half_life} must be at least 1 step and finite")
        check_whole(1, ceiling_interval=self.ceiling_interval)
        for name in ("backoff_factor", "calibration_backoff_factor"):
            if not 0.0 < getattr(self, name) < 1.0:
                raise ValueError(f"{name}={getattr(self, name)} must lie between 0 and 1")
        check_bounds(self.min_scale, self.max_scale)
        if self.max_scale is not None and self.max_scale < self.floor:
            raise ValueError(f"no power of two lies between min_scale={self.min_scale} and max_scale={self.max_scale}")

    @property
    def floor(self) -> float:
        """The smallest power of two that is at least ``min_scale``."""
        return -power_of_two_below(-self.min_scale)


def adjust_headroom(state: HeadroomState, settings: HeadroomSettings, report: StepReport) -> HeadroomState:
    """One update of the algorithm in :class:`HeadroomLossScaler`'s docstring."""
    state = count_step(state, report)
    if report.overflow:
        factor = settings.calibration_backoff_factor if state.peak is None else settings.backoff_factor
        lowered = max(power_of_two_below(state.scale * factor), min(settings.floor, state.scale))
        ceiling = None if state.peak is None else lowered  # before anything was measured, nothing is learned of it
        return replace(state, scale=lowered, ceiling=ceiling, clean_steps=0)
    peak, ceiling, clean_steps = state.peak, state.ceiling, state.clean_steps + 1
    largest = report.largest_gradient
    if largest is not None and 0.0 < largest < math.inf:
        decayed = 0.0 if peak is None else peak * 0.5 ** (1.0 / settings.half_life)
        peak = max(largest, decayed)
    if ceiling is not None and clean_steps >= settings.ceiling_interval:
        ceiling, clean_steps = ceiling * 2.0, 0
    scale = state.scale if peak is None else scale_with_headroom(peak, settings.headroom)
    upper = min(LARGEST_SCALE, settings.max_scale or LARGEST_SCALE)
    if ceiling is not None and ceiling >= upper:
        ceiling = None  # it no longer bounds anything
    scale = min(scale, power_of_two_below(upper if ceiling is None else ceiling))
    scale = max(scale, settings.floor)
    return replace(state, scale=scale, peak=peak, ceiling=ceiling, clean_steps=clean_steps)


def scale_with_headroom(magnitude: float, headroom: float) -> float:
    """The largest power of two S for which ``S * magnitude * 2**headroom`` is still finite in FP16."""
    return power_of_two_below(FP16_MAX / magnitude * 2.0**-headroom)


def power_of_two_below(value: float) -> float:
    """The largest power of two that is at most ``value``; for a negative value, of the negative ones."""
    mantissa, exponent = math.frexp(value)
    return math.ldexp(0.5, exponent) if value > 0.0 else -math.ldexp(0.5, exponent + (mantissa != -0.5))


def is_power_of_two(value: float) -> bool:
    """Whether multiplying by ``value`` only changes a number's exponent."""
    return math.frexp(value)[0] == 0.5


def to_fp32(value: float) -> float:
    """``value`` rounded to FP32, in which torch keeps a loss scale; ``inf`` beyond its range."""
    return ctypes.c_float(value).value


def headroom_left(scale: float, magnitude: float) -> float:
    """How many doublings ``scale`` could still take before a finite ``magnitude`` overflows: log2(65504 / (S * m))."""
    return math.log2(FP16_MAX / (scale * magnitude)) if magnitude > 0.0 else math.inf


def check_scale(scale: object) -> None:
    """Raise a ValueError unless ``scale`` is a positive number that FP32 holds, and whose inverse is finite there."""
    if not _is_real(scale) or not 0.0 < scale < math.inf:
        hint = ". It is for all devices: leave torch's device out" if isinstance(scale, str) else ""
        raise ValueError(f"a loss scale must be a positive, finite number, not {scale!r}{hint}")
    if not SMALLEST_SCALE <= scale <= FP32_MAX:
        raise ValueError(f"a loss scale must lie between 2**-126 and {FP32_MAX:.4g}, FP32's range, not {scale!r}")


def check_bounds(min_scale: float, max_scale: float | None) -> None:
    """Raise a ValueError unless the bounds are scales and in order; ``inf`` is no upper bound."""
    if not SMALLEST_SCALE <= min_scale <= LARGEST_SCALE:
        raise ValueError(
            f"min_scale={min_scale} must lie between 2**-126 and 2**127, the scales whose inverse FP32 holds: "
            "a scale never becomes 0"
        )
    if max_scale is not None and not max_scale >= min_scale:
        raise ValueError(f"max_scale={max_scale} must be at least min_scale={min_scale}")


def check_numbers(settings: DynamicSettings | HeadroomSettings) -> None:
    """Raise a TypeError unless all settings are numbers (None is no bound), a ValueError where a float cannot be."""
    for name, value in vars(settings).items():
        if value is None and name == "max_scale":
            continue
        if not isinstance(value, numbers.Real):
            raise TypeError(f"{name}={value!r} must be a number")
        try:
            float(value)
        except OverflowError:
            raise ValueError(f"{name} is larger than 1.8e308, which no float holds") from None


def check_whole(smallest: int, **counts: object) -> None:
    """Raise a ValueError unless all ``counts`` are whole numbers from ``smallest`` on."""
    for name, value in counts.items():
        if not isinstance(value, numbers.Integral) or value is True or value is False or value < smallest:
            raise ValueError(f"{name}={value!r} must be a whole number of steps, at least {smallest}")


def _is_real(value: object) -> TypeGuard[float]:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)
