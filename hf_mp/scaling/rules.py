"""Loss scale rules: frozen dataclasses. ``rule.adjust(report)`` returns the rule for the next step."""

from __future__ import annotations

import ctypes
import math
import numbers
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import partial
from typing import Any, ClassVar, Self, TypeGuard, TypeVar

import torch

FP16_MAX = 65504.0
FP32_MAX = torch.finfo(torch.float32).max
SMALLEST_SCALE = 2.0**-126  # its inverse is finite in FP32
# At 2**-48, an FP16 gradient of 65504 is an unscaled gradient of about 2**64. Its square exceeds FP32, so the step is
# skipped at any smaller scale too.
LEAST_USEFUL_SCALE = 2.0**-48
LARGEST_SCALE = 2.0**127


@dataclass(frozen=True)
class StepReport:
    """Overflow status and largest gradient of one optimizer step."""

    # a gradient was inf or NaN (in a MixedPrecision: or 2**64 or larger), so the step is skipped
    overflow: bool
    # largest magnitude of the unscaled gradients before clipping; None if it was not measured
    largest_gradient: float | None = None
    # a smaller scale may prevent the overflow: the loss is finite, and no other optimizer has reported the overflow
    may_be_scale: bool = True

    @classmethod
    def of_all(cls, reports: Iterable[StepReport]) -> StepReport:
        """Combine the reports of several optimizers, at least one, as ``GradScaler.update()`` does."""
        reports = list(reports)
        if overflows := [report for report in reports if report.overflow]:
            return cls(True, None, any(report.may_be_scale for report in overflows))
        measured = [report.largest_gradient for report in reports if report.largest_gradient is not None]
        return cls(False, max(measured, default=None))


# Checks of settings and of saved values


def _is_number(value: Any) -> TypeGuard[float]:
    is_real = isinstance(value, numbers.Real) and not isinstance(value, bool)
    return is_real and not sys.float_info.max < abs(value) < math.inf  # an int that no float holds


def check(meaning: str, holds: Callable[[Any], bool], **values: object) -> None:
    """Raise a ValueError with ``meaning`` unless ``holds(value)`` for all ``values``."""
    for name, value in values.items():
        if not holds(value):
            raise ValueError(f"{name}={value!r:.100} must be {meaning}")


def number(meaning: str, holds: Callable[[Any], bool]) -> Callable[..., None]:
    """Return a :func:`check` of numbers, not of a ``bool``."""
    return partial(check, meaning, lambda value: _is_number(value) and holds(value))


def whole(smallest: int) -> Callable[..., None]:
    meaning = f"a whole number of steps, at least {smallest}"
    return number(meaning, lambda value: isinstance(value, numbers.Integral) and int(value) >= smallest)


def check_scale(scale: object) -> None:
    """Raise a ValueError unless ``scale`` is a number from 2**-126 to FP32's largest."""
    if isinstance(scale, str):
        raise ValueError(f"a loss scale is a number, not {scale!r}. It is for all devices: leave torch's device out")
    if not _is_number(scale) or not SMALLEST_SCALE <= scale <= FP32_MAX:
        raise ValueError(f"a loss scale must be a number from 2**-126 to {FP32_MAX:.4g}, FP32's range, not {scale!r}")


_check_min_scale = number(
    "0 or a scale from 2**-126 to 2**127", lambda x: x == 0.0 or SMALLEST_SCALE <= x <= LARGEST_SCALE
)


def _check_max_scale(max_scale: object, min_scale: float) -> None:
    number(f"at least min_scale={min_scale}", lambda x: x >= max(min_scale, SMALLEST_SCALE))(max_scale=max_scale)


def setting(default: Any, check: Callable[..., None] | None = None) -> Any:
    """Declare a field of a rule that no step changes; ``check(name=value)`` raises a ValueError if it is invalid."""
    return field(default=default, kw_only=True, metadata={"check": check})


def remembered(default: Any, check: Callable[..., None], *, key: str | None = None) -> Any:
    """Declare a field of a rule that checkpoints store, under its name or ``key``."""
    return field(default=default, metadata={"check": check, "key": key})


@dataclass(frozen=True)
class ScaleRule:
    """A loss scale and the rule that updates it. :func:`register` makes a subclass available to all policies.

    Fields are declared with :func:`remembered` (changed by steps) and :func:`setting`.
    """

    name: ClassVar[str]  # value of loss_scale=...
    summary: ClassVar[str]  # for help texts
    exact: ClassVar[tuple[str, ...]] = ("scale",)  # fields with a warning unless they are powers of two

    scale: float = remembered(MISSING, check_scale)  # current loss scale, an FP32 value
    steps: int = remembered(0, whole(0))  # optimizer steps, skipped ones included
    skipped_steps: int = remembered(0, whole(0))
    consecutive_skips: int = remembered(0, whole(0))  # since the last applied step

    @property
    def floor(self) -> float:
        """The smallest scale that overflows can set."""
        return self.scale

    def adjust(self, report: StepReport) -> Self:
        """Return the rule for the next step."""
        return self.with_step_counted(report)

    def with_step_counted(self, report: StepReport, **changes: Any) -> Self:
        """Return this rule with the step counted and ``changes`` made."""
        return replace(
            self,
            steps=self.steps + 1,
            skipped_steps=self.skipped_steps + report.overflow,
            consecutive_skips=self.consecutive_skips + 1 if report.overflow else 0,
            **changes,
        )

    def is_searching_scale(self, clean_scale: float | None) -> bool:
        """Return whether an overflow is expected; ``clean_scale``: the largest scale of an applied step, or None."""
        return False

    def validated(self) -> Self:
        """Return this rule with its scale rounded to FP32; a ValueError for a field out of range."""
        for each in fields(self):
            if (check := each.metadata.get("check")) is not None:
                check(**{each.name: getattr(self, each.name)})
        return replace(self, scale=to_fp32(self.scale))

    @classmethod
    def _fields_by_key(cls) -> dict[str, str]:
        return {each.metadata["key"] or each.name: each.name for each in fields(cls) if "key" in each.metadata}

    def to_dict(self) -> dict[str, Any]:
        """Return the fields that checkpoints store, as plain values for JSON."""
        return {"kind": self.name, **{key: getattr(self, name) for key, name in self._fields_by_key().items()}}

    def from_dict(self, saved: Mapping[str, Any]) -> Self:
        """Return this rule with values of :meth:`to_dict`, not :meth:`validated`; a ValueError for other keys."""
        known, given = self._fields_by_key(), saved.keys() - {"kind"}
        if saved.get("kind") != self.name or given != known.keys():
            missing, unknown = sorted(known.keys() - given), sorted(given - known.keys(), key=str)
            raise ValueError(
                f"this state is neither one of a {self.name!r} loss scaler nor of a torch.amp.GradScaler: "
                f"kind={saved.get('kind')!r}, missing keys {missing}, unknown keys {unknown}"
            )
        return replace(self, **{name: saved[key] for key, name in known.items()})

    def from_torch(self, saved: Mapping[str, Any]) -> Self:
        """Return this rule with values of a ``torch.amp.GradScaler`` state, not :meth:`validated`; default: none."""
        return self


RULES: dict[str, type[ScaleRule]] = {}
"""Registered rules by name."""

Rule = TypeVar("Rule", bound=ScaleRule)


def register(rule: type[Rule]) -> type[Rule]:
    """Add ``rule`` to :data:`RULES`, and to help texts if :mod:`hf_mp.trainer` is imported afterwards."""
    RULES[rule.name] = rule
    return rule


class StaticRule(ScaleRule):
    """A constant scale. Not registered, because a policy contains the number itself."""

    name, summary = "static", "constant"


_LEAST_HEADROOM = 1.0  # doublings; lower bound of the adapted headroom
_FAST_ABOVE, _FAST = 4.0, 2.0  # headroom h sinks at a rate of at least _FAST * (h - _FAST_ABOVE)
_ABOVE_SEEN = 0.5  # doublings of headroom above a measured rise
_ABOVE_UNSEEN = 1.25  # doublings added by an overflow that no gradient explains
_FUTILE_HEADROOM = 12.0  # doublings with which an overflow is not due to the scale, unless it recurs within _AT_ONCE
_FUTILE_ADDED = 10.0  # ... and at least so many above the headroom of _FIRST_SCALE
_AT_ONCE = 16  # clean steps
_LARGEST_FALL = 8.0  # doublings; limits the effect of one batch with nearly no gradient
_FIRST_SCALE = 2.0**16  # torch's; small weight gradients allow more, but activation gradients may be far larger


@register
@dataclass(frozen=True)
class HeadroomRule(ScaleRule):
    """Scale computed from the largest gradients, with a headroom that adapts to them.

    Algorithm::

        clean step with largest unscaled gradient g > 0:
            if it is the first: level = g; headroom = enough for a scale of 2**16 at most, at least 5; done
            rise = log2(g / level)                      # doublings above the level
            if it follows an overflow:
                if rise > headroom: level = g; done     # a jump explains the overflow
                if quiet >= 16 and (futile or headroom >= max(12, headroom at scale 2**6)):
                    futile = True                       # no scale prevents it
                else: headroom += 1.25
                quiet = 0                               # clean steps since the last unexplained overflow
            else:
                quiet += 1
                if quiet >= 16 * patience: futile = False
            sinking = 1 / (1 + 8 * number of skipped steps)
            if futile or no step was skipped: sinking = max(sinking, 2 * (headroom - 4))
            headroom = max(headroom - sinking / patience, rise + 0.5, 1)
            level moves towards g, half the way (of their logarithms) in half_life steps;
                a fall counts 8 doublings at most
        clean step with all gradients 0:
            no change; before the first level, scale /= backoff_factor, up to init_scale
        after a clean step with a level: scale = largest power of two with scale * level * 2**headroom <= 65504
        overflow:
            scale *= backoff_factor; a scale above 1 is lowered to no less than 1
        overflow with a loss of inf or NaN, or one that lowered the scale already: the scale and the level stay

    :class:`~hf_mp.scaling.scalers.HeadroomLossScaler` explains the settings.
    """

    name, summary = "headroom", "follows the gradients"

    init_scale: float = setting(2.0**10)
    init_headroom: float = setting(5.0)
    half_life: float = setting(25, number("at least 1 step and finite", lambda x: 1 <= x < math.inf))
    backoff_factor: float = setting(2.0**-20, number("above 0 and below 1", lambda x: 0.0 < x < 1.0))
    patience: int = setting(250, whole(1))
    min_scale: float = setting(LEAST_USEFUL_SCALE, _check_min_scale)  # validated() rounds both bounds to powers of two
    max_scale: float = setting(2.0**40)
    largest: float = setting(FP16_MAX, number("a positive, finite number", lambda x: 0.0 < x < math.inf))

    scale: float = remembered(2.0**10, check_scale)
    # running geometric mean of the largest unscaled gradients; None before the first
    level: float | None = remembered(
        None,
        partial(
            check, "a positive, finite number or None", lambda x: x is None or (_is_number(x) and 0.0 < x < math.inf)
        ),
    )
    # doublings between the level and the largest number
    headroom: float = remembered(5.0, number("a finite number of doublings, at least 0", lambda x: 0.0 <= x < math.inf))
    is_futile: bool = remembered(  # whether headroom does not prevent the overflows
        False, partial(check, "True or False", lambda x: isinstance(x, bool))
    )
    quiet_steps: int = remembered(0, whole(0))  # clean steps since the last unexplained overflow

    @property
    def floor(self) -> float:
        return self.min_scale

    def validated(self) -> Self:
        checked = super().validated()
        _check_max_scale(self.max_scale, self.min_scale)
        floor = -power_of_two_below(-max(self.min_scale, SMALLEST_SCALE))  # rounded up
        ceiling = power_of_two_below(min(self.max_scale, LARGEST_SCALE))
        if ceiling < floor:
            raise ValueError(f"no power of two lies between min_scale={self.min_scale} and max_scale={self.max_scale}")
        return replace(checked, min_scale=floor, max_scale=ceiling)

    def is_searching_scale(self, clean_scale: float | None) -> bool:
        return self.scale > 1.0 and self.level is None

    def adjust(self, report: StepReport) -> Self:
        if report.overflow and not report.may_be_scale:
            return replace(self, steps=self.steps + 1)
        if report.overflow:
            return self.with_step_counted(report, scale=self._lowered_scale())
        largest = report.largest_gradient
        learned = self if largest is None or not 0.0 < largest < math.inf else self._learned(largest)
        if learned.level is not None:
            scale = scale_with_headroom(learned.level, learned.headroom, self.largest)
        elif largest == 0.0:  # gradients may have underflowed at a scale that overflows lowered
            scale = max(self.scale, min(self.scale / self.backoff_factor, self.init_scale))
        else:
            scale = self.scale
        return learned.with_step_counted(report, scale=max(min(scale, self.max_scale), self.min_scale))

    def _lowered_scale(self) -> float:
        # A scale above 1 is lowered to no less than 1: nearly all gradients fit there.
        least = max(self.min_scale, 1.0 if self.scale > 1.0 else SMALLEST_SCALE)
        fallen = power_of_two_below(max(self.scale * self.backoff_factor, SMALLEST_SCALE))
        return max(fallen, min(least, self.scale))

    def _learned(self, largest: float) -> Self:
        """Return this rule with level and headroom, not the scale, updated by a measured gradient."""
        if self.level is None:
            # Slightly less headroom than the cap leaves, so that rounding does not halve the scale.
            capped = headroom_left(max(_FIRST_SCALE, self.init_scale), largest, self.largest) - 2.0**-20
            return replace(self, level=float(largest), headroom=max(self.headroom, capped))
        rise = math.log2(largest / self.level)
        if self.consecutive_skips and rise > self.headroom:  # this gradient explains the overflow
            return replace(self, level=float(largest))
        headroom, is_futile = self.headroom, self.is_futile
        quiet_steps = 0 if self.consecutive_skips else self.quiet_steps + 1
        if not self.consecutive_skips:
            is_futile = is_futile and quiet_steps < 16 * self.patience
        elif self._is_headroom_futile(self.level):
            is_futile = True
        else:
            headroom += _ABOVE_UNSEEN
        sunk = self._sunk_headroom(headroom, is_futile)
        headroom = max(sunk, rise + _ABOVE_SEEN, min(_LEAST_HEADROOM, self.init_headroom))
        level = self._moved_level(self.level, rise)
        return replace(self, level=level, headroom=headroom, is_futile=is_futile, quiet_steps=quiet_steps)

    def _is_headroom_futile(self, level: float) -> bool:
        """Return whether more headroom would not have prevented an overflow that no gradient explains."""
        # Small gradients have much headroom at the first scale: only later increases count.
        futile = max(_FUTILE_HEADROOM, headroom_left(_FIRST_SCALE, level, self.largest) + _FUTILE_ADDED)
        return self.quiet_steps >= _AT_ONCE and (self.is_futile or self.headroom >= futile)

    def _sunk_headroom(self, headroom: float, is_futile: bool) -> float:
        """Return ``headroom`` after one step of sinking, without a lower bound."""
        sinking = 1.0 / (1 + 8 * self.skipped_steps)
        if is_futile or not self.skipped_steps:
            sinking = max(sinking, _FAST * (headroom - _FAST_ABOVE))
        return headroom - sinking / self.patience

    def _moved_level(self, level: float, rise: float) -> float:
        """Return ``level`` moved towards a gradient ``rise`` doublings above it."""
        weight = 1.0 - 0.5 ** (1.0 / self.half_life)
        return level * 2.0 ** (weight * max(rise, -_LARGEST_FALL))


@register
@dataclass(frozen=True)
class DynamicRule(ScaleRule):
    """The algorithm of ``torch.amp.GradScaler``, with bounds and hysteresis."""

    name, summary = "dynamic", "torch's algorithm"
    exact = ("scale", "growth_factor", "backoff_factor", "min_scale", "max_scale")

    hysteresis: int = setting(1, whole(1))
    consecutive_hysteresis: bool = setting(False)
    growth_delay: int = setting(0, whole(0))
    min_scale: float = setting(LEAST_USEFUL_SCALE, _check_min_scale)
    max_scale: float = setting(math.inf)

    scale: float = remembered(2.0**16, check_scale)
    growth_factor: float = remembered(2.0, number("at least 1.0 and finite", lambda x: 1.0 <= x < math.inf))
    backoff_factor: float = remembered(
        0.5, number("below 1.0, so that an overflow lowers it", lambda x: -math.inf < x < 1.0)
    )
    growth_interval: int = remembered(2000, whole(1))
    # clean steps since the last overflow or growth; negative while growth_delay lasts
    growth_tracker: int = remembered(0, whole(-(2**31)), key="_growth_tracker")
    hysteresis_left: int = remembered(1, whole(1))  # overflows until the scale is lowered, that one included

    @property
    def floor(self) -> float:
        return to_fp32(max(self.min_scale, SMALLEST_SCALE))

    def validated(self) -> Self:
        checked = super().validated()
        _check_max_scale(self.max_scale, self.min_scale)
        return checked

    def is_searching_scale(self, clean_scale: float | None) -> bool:
        was_clean = clean_scale is not None and self.scale <= clean_scale
        return self.scale > 1.0 and not was_clean and self.growth_tracker <= 0

    def from_torch(self, saved: Mapping[str, Any]) -> Self:
        fresh = {"consecutive_skips": 0, "hysteresis_left": self.hysteresis}
        return self.from_dict({**self.to_dict(), **fresh, **saved})

    def adjust(self, report: StepReport) -> Self:
        if report.overflow:
            if self.hysteresis_left > 1:
                spent = self.hysteresis_left - 1
                return self.with_step_counted(report, growth_tracker=-self.growth_delay, hysteresis_left=spent)
            # A scale that was set below the floor stays.
            lowered = to_fp32(max(self.scale * self.backoff_factor, min(self.floor, self.scale)))
            return self.with_step_counted(report, scale=lowered, growth_tracker=-self.growth_delay)
        left = self.hysteresis if self.consecutive_hysteresis else self.hysteresis_left
        if (tracker := self.growth_tracker + 1) < self.growth_interval:
            return self.with_step_counted(report, growth_tracker=tracker, hysteresis_left=left)
        grown = to_fp32(self.scale * self.growth_factor)
        # As in torch, a scale that would exceed FP32 does not grow.
        grown = min(grown, max(self.max_scale, self.scale)) if math.isfinite(grown) else self.scale
        return self.with_step_counted(report, scale=grown, growth_tracker=0, hysteresis_left=self.hysteresis)


def parse_loss_scale(value: str | float | None) -> str | float | None:
    """Parse a loss scale: return the name of a rule, a number, or None for no scaling.

    ``value`` is a name in :data:`RULES`, ``"none"``, a positive number or its text, or None. A ValueError for any other
    text, and for zero, negative, infinite and NaN numbers.
    """
    if value is None or value == "none":
        return None
    if isinstance(value, str) and value in RULES:
        return value
    try:
        if isinstance(value, bool):  # float(True) is 1.0
            raise TypeError
        scale = float(value)
    except (ValueError, TypeError, OverflowError):
        names = ", ".join(map(repr, (*RULES, "none")))
        raise ValueError(f"loss_scale={value!r} is not known: use {names} or a positive number") from None
    if not 0.0 < scale < float("inf"):
        raise ValueError(f"loss_scale={value!r} must be a positive, finite number (a power of two keeps scaling exact)")
    return scale


# Numbers


def scale_with_headroom(magnitude: float, headroom: float, largest: float = FP16_MAX) -> float:
    """Return the largest power of two S with ``S * magnitude * 2**headroom <= largest``."""
    return power_of_two_below(largest / magnitude * 2.0**-headroom)


def power_of_two_below(value: float) -> float:
    """Return the largest ``2**k`` up to ``value``; for a negative ``value``, the largest ``-(2**k)``."""
    mantissa, exponent = math.frexp(value)
    return math.ldexp(0.5, exponent) if value > 0.0 else -math.ldexp(0.5, exponent + (mantissa != -0.5))


def to_fp32(value: float) -> float:
    """Return ``value`` rounded to FP32; ``inf`` beyond its range."""
    return ctypes.c_float(value).value


def headroom_left(scale: float, magnitude: float, largest: float = FP16_MAX) -> float:
    """Return the doublings of ``scale`` until ``magnitude`` overflows; inf for 0."""
    return math.log2(largest / (scale * magnitude)) if magnitude > 0.0 else math.inf


def scale_text(scale: float) -> str:
    """Format a loss scale for messages, as ``16384``, ``2^20`` (from 1e6 on) or ``2^-14``."""
    if float(scale).is_integer() and scale < 1e6:
        return f"{scale:.0f}"
    mantissa, exponent = math.frexp(scale)
    return f"2^{exponent - 1}" if mantissa == 0.5 else f"{scale:g}"


@dataclass(frozen=True)
class PrecisionStats:
    """Statistics of mixed precision in a run. Steps of several optimizers between two backwards count as one.

    After a resume, the counts continue those of the checkpoint.

    Attributes:
        steps: optimizer steps, skipped ones included.
        skipped_steps: steps that at least one optimizer skipped because of an overflow.
        loss_scale: the current loss scale; 1.0 if nothing is scaled.
        loss_scale_first, loss_scale_min, loss_scale_max: the first, smallest and largest loss scale of a step.
        headroom: doublings of the scale before an overflow, at the last clean step; None if not measured.
        remedies: rules that ``on_overflow="heal"`` added, as ``"module:op: rule"``.
    """

    steps: int = 0
    skipped_steps: int = 0
    loss_scale: float = 1.0
    loss_scale_first: float = 1.0
    loss_scale_min: float = 1.0
    loss_scale_max: float = 1.0
    headroom: float | None = None
    remedies: tuple[str, ...] = ()

    def log_entries(self) -> dict[str, float]:
        """Return the log entries ``loss_scale``, ``skipped_steps``, and if any ``remedies`` and ``headroom``."""
        # The Trainer prints the float 16384.0 as 1.638e+04.
        scale = int(self.loss_scale) if self.loss_scale.is_integer() else self.loss_scale
        entries = {"loss_scale": scale, "skipped_steps": self.skipped_steps}
        if self.remedies:
            entries["remedies"] = len(self.remedies)
        return entries if self.headroom is None else {**entries, "headroom": round(self.headroom, 2)}

    @classmethod
    def before_first_step(cls, scale: float) -> PrecisionStats:
        return cls(loss_scale=scale, loss_scale_first=scale, loss_scale_min=scale, loss_scale_max=scale)

    @classmethod
    def resumed(cls, state: ScaleRule) -> PrecisionStats:
        return replace(cls.before_first_step(state.scale), steps=state.steps, skipped_steps=state.skipped_steps)

    def with_step(self, used_scale: float, next_scale: float, report: StepReport) -> PrecisionStats:
        """Return the statistics with one more step, which ran at ``used_scale``."""
        largest = report.largest_gradient  # None for an overflow
        return replace(
            self,
            steps=self.steps + 1,
            skipped_steps=self.skipped_steps + report.overflow,
            loss_scale=next_scale,
            loss_scale_min=min(self.loss_scale_min, used_scale),
            loss_scale_max=max(self.loss_scale_max, used_scale),
            headroom=headroom_left(next_scale, largest) if largest else self.headroom,
        )
