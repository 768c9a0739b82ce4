"""The pure rules of loss scaling: functions of frozen values that turn what a step saw into the next scale.

A rule is one entry of :data:`RULES`: policies, messages, argument help, scripts and tests take its name from there.
"""

from __future__ import annotations

import ctypes
import math
import numbers
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Generic, Self, TypeGuard, TypeVar

import torch

FP16_MAX = torch.finfo(torch.float16).max  # 65504
FP32_MAX = torch.finfo(torch.float32).max
SMALLEST_SCALE = 2.0**-126  # its inverse is finite in FP32
# Where overflows stop lowering a scale by default: there FP16's largest number is a gradient of 2**64, whose square
# leaves FP32, so that the step is skipped in any case.
LEAST_USEFUL_SCALE = 2.0**-48
LARGEST_SCALE = 2.0**127


@dataclass(frozen=True)
class StepReport:
    """What one optimizer step saw."""

    # whether a gradient was inf or NaN (or too large to be squared, where a MixedPrecision looks): no update
    overflow: bool
    # largest magnitude among the unscaled gradients before clipping; None if it was not measured
    largest_gradient: float | None = None


@dataclass(frozen=True)
class ScalerState:
    """What every scaler remembers between steps; its fields are its saved state."""

    scale: float  # the loss scale in force; FP32 holds it, in which tensors have it
    steps: int = 0  # optimizer steps recorded, skipped ones included
    skipped_steps: int = 0
    consecutive_skips: int = 0  # since the last applied step

    def checked(self) -> Self:
        """This state, its scale rounded to FP32; a ValueError for values that come from outside and are none."""
        check_scale(self.scale)
        check_whole(0, steps=self.steps, skipped_steps=self.skipped_steps, consecutive_skips=self.consecutive_skips)
        return replace(self, scale=to_fp32(self.scale))

    def counted(self, report: StepReport, **changes: Any) -> Self:
        """This state with the step counted and ``changes`` made."""
        return replace(
            self,
            steps=self.steps + 1,
            skipped_steps=self.skipped_steps + report.overflow,
            consecutive_skips=self.consecutive_skips + 1 if report.overflow else 0,
            **changes,
        )

    def is_finding_its_level(self, clean_scale: float | None) -> bool:
        """Whether an overflow is expected now; ``clean_scale`` is the largest of an applied step of this process."""
        return False


State = TypeVar("State", bound=ScalerState)


@dataclass(frozen=True)
class ScaleRule(Generic[State]):
    """One way of setting the loss scale. :func:`register` makes it a ``loss_scale`` of every policy."""

    name: str  # what loss_scale=... calls it
    summary: str  # a few words for help texts
    # A frozen dataclass whose fields are the keyword arguments, with EXACT, the names of those by which scales are
    # multiplied or to which they are set, and floor, the smallest scale that overflows lead to.
    settings: type[Any]
    start: Callable[[Any], State]  # from the settings to the state of the first step
    adjust: Callable[[State, Any, StepReport], State]


RULES: dict[str, ScaleRule[Any]] = {}
"""The rules that a policy can name."""


def register(rule: ScaleRule[State]) -> ScaleRule[State]:
    """Let policies name ``rule``; before :mod:`hf_mp.trainer` is imported, so that its help texts list it too."""
    RULES[rule.name] = rule
    return rule


@dataclass(frozen=True)
class StaticSettings:
    """Settings of :class:`StaticLossScaler`."""

    EXACT: ClassVar = ("scale",)
    scale: float

    @property
    def floor(self) -> float:
        return to_fp32(self.scale)

    def start(self) -> ScalerState:
        return ScalerState(self.scale)


def adjust_static(state: ScalerState, settings: StaticSettings, report: StepReport) -> ScalerState:
    """Only count."""
    return state.counted(report)


# Not registered: a policy names it by its number.
STATIC = ScaleRule("static", "constant", StaticSettings, StaticSettings.start, adjust_static)


@dataclass(frozen=True)
class DynamicState(ScalerState):
    """What :class:`DynamicLossScaler` remembers besides."""

    growth_tracker: int = 0  # clean steps since the last overflow or growth; negative while growth_delay lasts
    hysteresis_left: int = 1  # overflows until the scale is lowered, counting the one that lowers it

    def checked(self) -> Self:
        check_whole(-(2**31), growth_tracker=self.growth_tracker)
        check_whole(1, hysteresis_left=self.hysteresis_left)
        return super().checked()

    def is_finding_its_level(self, clean_scale: float | None) -> bool:
        was_clean = clean_scale is not None and self.scale <= clean_scale
        return self.scale > 1.0 and not was_clean and self.growth_tracker <= 0


@dataclass(frozen=True)
class DynamicSettings:
    """Settings of :func:`adjust_dynamic`; see :class:`DynamicLossScaler`."""

    EXACT: ClassVar = ("init_scale", "growth_factor", "backoff_factor", "min_scale", "max_scale")
    init_scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    hysteresis: int = 1
    consecutive_hysteresis: bool = False
    growth_delay: int = 0
    min_scale: float = LEAST_USEFUL_SCALE
    max_scale: float | None = None

    def __post_init__(self) -> None:
        check(lambda x: 1.0 <= x < math.inf, "at least 1.0 and finite", growth_factor=self.growth_factor)
        lowers = "below 1.0, so that an overflow lowers it"
        check(lambda x: -math.inf < x < 1.0, lowers, backoff_factor=self.backoff_factor)
        check_whole(1, growth_interval=self.growth_interval, hysteresis=self.hysteresis)
        check_whole(0, growth_delay=self.growth_delay)
        check_bounds(self.min_scale, self.max_scale)

    @property
    def floor(self) -> float:
        return to_fp32(max(self.min_scale, SMALLEST_SCALE))

    def start(self) -> DynamicState:
        return DynamicState(self.init_scale, growth_tracker=-self.growth_delay, hysteresis_left=self.hysteresis)


def adjust_dynamic(state: DynamicState, settings: DynamicSettings, report: StepReport) -> DynamicState:
    """One update of torch's algorithm (the documentation of ``torch.amp.GradScaler``), with bounds and hysteresis."""
    if report.overflow:
        if state.hysteresis_left > 1:
            spent = state.hysteresis_left - 1
            return state.counted(report, growth_tracker=-settings.growth_delay, hysteresis_left=spent)
        # A scale that is below the floor already, because it was set there, stays.
        lowered = to_fp32(max(state.scale * settings.backoff_factor, min(settings.floor, state.scale)))
        return state.counted(report, scale=lowered, growth_tracker=-settings.growth_delay)
    left = settings.hysteresis if settings.consecutive_hysteresis else state.hysteresis_left
    tracker = state.growth_tracker + 1
    if tracker < settings.growth_interval:
        return state.counted(report, growth_tracker=tracker, hysteresis_left=left)
    grown = to_fp32(state.scale * settings.growth_factor)
    if not math.isfinite(grown):  # torch keeps a scale that would leave FP32
        grown = state.scale
    if settings.max_scale is not None:
        grown = min(grown, max(settings.max_scale, state.scale))
    return state.counted(report, scale=grown, growth_tracker=0, hysteresis_left=settings.hysteresis)


# The scale that follows the gradients

_LEAST_HEADROOM = 1.0  # doublings; learned headroom sinks no further
_FAST_ABOVE, _FAST = 4.0, 2.0  # above so many doublings headroom sinks the faster, by so much for each doubling
_ABOVE_SEEN = 0.5  # doublings that are kept above a rise that was seen
_ABOVE_UNSEEN = 1.25  # the headroom that an overflow adds whose gradient nothing shows
_FUTILE_HEADROOM = 12.0  # doublings at which an overflow is not the scale's, unless it returns at once
_FUTILE_ADDED = 10.0  # ... but no less than so many above that of the first scale
_AT_ONCE = 16  # an overflow that returns within so many clean steps is the scale's, whatever its headroom
_LARGEST_FALL = 8.0  # doublings that one step may count for: a batch of next to no gradient says little
_FIRST_SCALE = 2.0**16  # torch's; gradients of activations may be far above those of weights that ask for more


@dataclass(frozen=True)
class HeadroomState(ScalerState):
    """What :class:`HeadroomLossScaler` remembers besides."""

    level: float | None = None  # running geometric mean of the largest unscaled gradients; None until one was finite
    headroom: float = 5.0  # doublings that are kept between the level and FP16's largest number
    is_futile: bool = False  # whether overflows were seen that headroom does not help against
    quiet_steps: int = 0  # clean steps since the last overflow that no gradient explained

    def checked(self) -> Self:
        check_whole(0, quiet_steps=self.quiet_steps)
        check(lambda x: 0.0 <= x < math.inf, "a finite number of doublings, at least 0", headroom=self.headroom)
        if not isinstance(self.is_futile, bool):
            raise ValueError(f"is_futile={self.is_futile!r} must be True or False")
        if self.level is not None:
            check(lambda x: 0.0 < x < math.inf, "a positive, finite number or None", level=self.level)
        return super().checked()

    def is_finding_its_level(self, clean_scale: float | None) -> bool:
        return self.scale > 1.0 and self.level is None


@dataclass(frozen=True)
class HeadroomSettings:
    """Settings of :func:`adjust_headroom`; see :class:`HeadroomLossScaler`."""

    EXACT: ClassVar = ("init_scale",)  # the others are rounded by the rule
    init_scale: float = 2.0**10
    headroom: float = 5.0
    half_life: float = 25
    backoff_factor: float = 2.0**-20
    patience: int = 250
    min_scale: float = LEAST_USEFUL_SCALE
    max_scale: float | None = 2.0**40

    def __post_init__(self) -> None:
        check(lambda x: 0.0 <= x <= 30.0, "0 to 30 doublings (FP16 has 40 in all)", headroom=self.headroom)
        check(lambda x: 1 <= x < math.inf, "at least 1 step and finite", half_life=self.half_life)
        check(lambda x: 0.0 < x < 1.0, "above 0 and below 1", backoff_factor=self.backoff_factor)
        check_whole(1, patience=self.patience)
        check_bounds(self.min_scale, self.max_scale)
        if self.ceiling < self.floor:
            raise ValueError(f"no power of two lies between min_scale={self.min_scale} and max_scale={self.max_scale}")

    @property
    def floor(self) -> float:
        return -power_of_two_below(-max(self.min_scale, SMALLEST_SCALE))

    @property
    def ceiling(self) -> float:
        return power_of_two_below(LARGEST_SCALE if self.max_scale is None else min(self.max_scale, LARGEST_SCALE))

    def start(self) -> HeadroomState:
        return HeadroomState(self.init_scale, headroom=self.headroom)


def adjust_headroom(state: HeadroomState, settings: HeadroomSettings, report: StepReport) -> HeadroomState:
    """One update of the algorithm in :class:`HeadroomLossScaler`'s docstring."""
    if report.overflow:
        # From above 1 no further than to 1, where next to all gradients fit.
        least = max(settings.floor, 1.0 if state.scale > 1.0 else SMALLEST_SCALE)
        fallen = power_of_two_below(max(state.scale * settings.backoff_factor, SMALLEST_SCALE))
        return state.counted(report, scale=max(fallen, min(least, state.scale)))
    largest = report.largest_gradient
    if largest is not None and 0.0 < largest < math.inf:
        state = _learned(state, settings, largest)
    if state.level is not None:
        scale = scale_with_headroom(state.level, state.headroom)
    elif largest == 0.0:  # nothing but zeros: FP16 may have lost the gradients at a scale that overflows led to
        scale = max(state.scale, min(state.scale / settings.backoff_factor, settings.init_scale))
    else:
        scale = state.scale
    return state.counted(report, scale=max(min(scale, settings.ceiling), settings.floor))


def _learned(state: HeadroomState, settings: HeadroomSettings, largest: float) -> HeadroomState:
    """The state with a measured gradient taken in; the scale is not set yet."""
    if state.level is None:
        # A hair less headroom than the cap asks for, so that rounding does not halve the scale.
        capped = headroom_left(max(_FIRST_SCALE, settings.init_scale), largest) - 2.0**-20
        return replace(state, level=float(largest), headroom=max(state.headroom, capped))
    rise = math.log2(largest / state.level)
    if state.consecutive_skips and rise > state.headroom:
        return replace(state, level=float(largest))
    if state.consecutive_skips:
        state = _after_unexplained_overflow(state)
    else:
        quiet_steps = state.quiet_steps + 1
        is_futile = state.is_futile and quiet_steps < 16 * settings.patience
        state = replace(state, quiet_steps=quiet_steps, is_futile=is_futile)
    sinking = 1.0 / (1 + 8 * state.skipped_steps)
    if state.is_futile or not state.skipped_steps:
        sinking = max(sinking, _FAST * (state.headroom - _FAST_ABOVE))
    sunk = state.headroom - sinking / settings.patience
    headroom = max(sunk, rise + _ABOVE_SEEN, min(_LEAST_HEADROOM, settings.headroom))
    weight = 1.0 - 0.5 ** (1.0 / settings.half_life)
    return replace(state, level=state.level * 2.0 ** (weight * max(rise, -_LARGEST_FALL)), headroom=headroom)


def _after_unexplained_overflow(state: HeadroomState) -> HeadroomState:
    # Small gradients have much headroom from the beginning, by the first scale: what overflows have added counts.
    futile = max(_FUTILE_HEADROOM, headroom_left(_FIRST_SCALE, state.level or 1.0) + _FUTILE_ADDED)
    if state.quiet_steps >= _AT_ONCE and (state.is_futile or state.headroom >= futile):
        return replace(state, is_futile=True, quiet_steps=0)
    return replace(state, headroom=state.headroom + _ABOVE_UNSEEN, quiet_steps=0)


HEADROOM = ScaleRule("headroom", "follows the gradients", HeadroomSettings, HeadroomSettings.start, adjust_headroom)
DYNAMIC = ScaleRule("dynamic", "torch's algorithm", DynamicSettings, DynamicSettings.start, adjust_dynamic)
register(HEADROOM)
register(DYNAMIC)


def scale_with_headroom(magnitude: float, headroom: float) -> float:
    """The largest power of two S for which ``S * magnitude * 2**headroom`` is still finite in FP16."""
    return power_of_two_below(FP16_MAX / magnitude * 2.0**-headroom)


def power_of_two_below(value: float) -> float:
    """The largest power of two that is at most ``value``; for a negative value, of the negative ones."""
    mantissa, exponent = math.frexp(value)
    return math.ldexp(0.5, exponent) if value > 0.0 else -math.ldexp(0.5, exponent + (mantissa != -0.5))


def to_fp32(value: float) -> float:
    """``value`` rounded to FP32, in which torch keeps a loss scale; ``inf`` beyond its range."""
    return ctypes.c_float(value).value


def headroom_left(scale: float, magnitude: float) -> float:
    """How many doublings ``scale`` could still take before a finite ``magnitude`` overflows: log2(65504 / (S * m))."""
    return math.log2(FP16_MAX / (scale * magnitude)) if magnitude > 0.0 else math.inf


def scale_text(scale: float) -> str:
    """A loss scale as all messages and pages write it: ``16384``, or ``2^20`` and ``2^-14`` where digits are many."""
    if float(scale).is_integer() and scale < 1e6:
        return f"{scale:.0f}"
    mantissa, exponent = math.frexp(scale)
    return f"2^{exponent - 1}" if mantissa == 0.5 else f"{scale:g}"


def _is_number(value: Any) -> TypeGuard[float]:
    # int and float first: asking an abstract class takes a microsecond, and a state is checked at every step
    is_real = isinstance(value, (int, float, numbers.Real)) and not isinstance(value, bool)
    return is_real and not sys.float_info.max < abs(value) < math.inf  # an int that no float holds


def check(holds: Callable[[Any], bool], meaning: str, **values: object) -> None:
    """Raise a ValueError that says ``meaning`` unless all ``values`` are numbers for which ``holds``."""
    for name, value in values.items():
        if not _is_number(value) or not holds(value):
            raise ValueError(f"{name}={value!r:.100} must be {meaning}")


def check_whole(smallest: int, **counts: object) -> None:
    """Raise a ValueError unless all ``counts`` are whole numbers from ``smallest`` on."""
    for name, value in counts.items():
        if not isinstance(value, (int, numbers.Integral)) or isinstance(value, bool) or value < smallest:
            raise ValueError(f"{name}={value!r} must be a whole number of steps, at least {smallest}")


def check_scale(scale: object) -> None:
    """Raise a ValueError unless ``scale`` is a positive number that FP32 holds, and whose inverse is finite there."""
    if isinstance(scale, str):
        raise ValueError(f"a loss scale is a number, not {scale!r}. It is for all devices: leave torch's device out")
    if not _is_number(scale) or not SMALLEST_SCALE <= scale <= FP32_MAX:
        raise ValueError(f"a loss scale must be a number from 2**-126 to {FP32_MAX:.4g}, FP32's range, not {scale!r}")


def check_bounds(min_scale: float, max_scale: float | None) -> None:
    """Raise a ValueError unless the bounds are scales and in order; 0 is no lower and ``inf`` no upper bound."""
    check(lambda x: x == 0.0 or SMALLEST_SCALE <= x <= LARGEST_SCALE, "0 or a scale from 2**-126 to 2**127",
          min_scale=min_scale)  # fmt: skip
    if max_scale is not None:
        check(lambda x: x >= max(min_scale, SMALLEST_SCALE), f"at least min_scale={min_scale}", max_scale=max_scale)
