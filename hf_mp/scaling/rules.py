"""The rules of loss scaling: frozen values, each of which turns what a step saw into the value of the next step.

A rule is one class in :data:`RULES`: policies, messages, argument help, scripts and tests take its name from there.
What a run's steps did so far is such a value as well: :class:`PrecisionStats`.
"""

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

FP16_MAX = 65504.0  # the largest FP16 number
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
    # whether a smaller scale may have prevented the overflow: not if the loss itself was inf or NaN, nor if another
    # optimizer has reported the same overflow before, because the scale was lowered then
    is_of_scale: bool = True

    @classmethod
    def of_all(cls, reports: Iterable[StepReport]) -> StepReport:
        """Combine the reports of several optimizers, at least one, as ``GradScaler.update()`` does.

        An overflow in one of them is an overflow; a largest gradient that was not measured does not count.
        """
        reports = list(reports)
        if overflows := [report for report in reports if report.overflow]:
            return cls(True, None, any(report.is_of_scale for report in overflows))
        measured = [report.largest_gradient for report in reports if report.largest_gradient is not None]
        return cls(False, max(measured, default=None))


# Values from outside


def _is_number(value: Any) -> TypeGuard[float]:
    is_real = isinstance(value, numbers.Real) and not isinstance(value, bool)
    return is_real and not sys.float_info.max < abs(value) < math.inf  # an int that no float holds


def check(meaning: str, holds: Callable[[Any], bool], **values: object) -> None:
    """Raise a ValueError that says ``meaning`` unless ``holds(value)`` for all ``values``."""
    for name, value in values.items():
        if not holds(value):
            raise ValueError(f"{name}={value!r:.100} must be {meaning}")


def number(meaning: str, holds: Callable[[Any], bool]) -> Callable[..., None]:
    """The :func:`check` of numbers; ``bool`` does not count as one."""
    return partial(check, meaning, lambda value: _is_number(value) and holds(value))


def whole(smallest: int) -> Callable[..., None]:
    """The :func:`check` of counts."""
    meaning = f"a whole number of steps, at least {smallest}"
    return number(meaning, lambda value: isinstance(value, numbers.Integral) and int(value) >= smallest)


def check_scale(scale: object) -> None:
    """Raise a ValueError unless ``scale`` is a positive number that FP32 holds, and whose inverse is finite there."""
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
    """A field of a rule that stays as it is; ``check(name=value)`` raises a ValueError for what is not allowed."""
    return field(default=default, kw_only=True, metadata={"check": check})


def remembered(default: Any, check: Callable[..., None], *, key: str | None = None) -> Any:
    """A field of a rule that a checkpoint holds, by its name or as ``key``."""
    return field(default=default, metadata={"check": check, "key": key})


@dataclass(frozen=True)
class ScaleRule:
    """A loss scale and the rule that sets it. :func:`register` makes a subclass a ``loss_scale`` of every policy.

    Fields are made with :func:`remembered` (what steps change, and a checkpoint holds) and :func:`setting`.
    """

    name: ClassVar[str]  # what loss_scale=... calls it
    summary: ClassVar[str]  # a few words for help texts
    exact: ClassVar[tuple[str, ...]] = ("scale",)  # fields that make scaling round where they are no powers of two

    scale: float = remembered(MISSING, check_scale)  # the loss scale in force; FP32 holds it
    steps: int = remembered(0, whole(0))  # optimizer steps recorded, skipped ones included
    skipped_steps: int = remembered(0, whole(0))
    consecutive_skips: int = remembered(0, whole(0))  # since the last applied step

    @property
    def floor(self) -> float:
        """The smallest scale that overflows lead to."""
        return self.scale

    def adjust(self, report: StepReport) -> Self:
        """The value of the next step."""
        return self.counted(report)

    def counted(self, report: StepReport, **changes: Any) -> Self:
        """This value with the step counted and ``changes`` made."""
        return replace(
            self,
            steps=self.steps + 1,
            skipped_steps=self.skipped_steps + report.overflow,
            consecutive_skips=self.consecutive_skips + 1 if report.overflow else 0,
            **changes,
        )

    def is_finding_its_level(self, clean_scale: float | None) -> bool:
        """Whether an overflow is expected now; ``clean_scale``: the largest scale of this process's applied steps."""
        return False

    def checked(self) -> Self:
        """This value with its scale rounded to FP32; a ValueError for a field outside of its range."""
        for each in fields(self):
            if (check := each.metadata.get("check")) is not None:
                check(**{each.name: getattr(self, each.name)})
        return replace(self, scale=to_fp32(self.scale))

    @classmethod
    def _fields_by_key(cls) -> dict[str, str]:
        return {each.metadata["key"] or each.name: each.name for each in fields(cls) if "key" in each.metadata}

    def to_dict(self) -> dict[str, Any]:
        """What a checkpoint holds, as plain values for JSON."""
        return {"kind": self.name, **{key: getattr(self, name) for key, name in self._fields_by_key().items()}}

    def from_dict(self, saved: Mapping[str, Any]) -> Self:
        """These settings with what :meth:`to_dict` gave, not :meth:`checked` yet; a ValueError for other keys."""
        known, given = self._fields_by_key(), saved.keys() - {"kind"}
        if saved.get("kind") != self.name or given != known.keys():
            missing, unknown = sorted(known.keys() - given), sorted(given - known.keys(), key=str)
            raise ValueError(
                f"this state is neither one of a {self.name!r} loss scaler nor of a torch.amp.GradScaler: "
                f"kind={saved.get('kind')!r}, missing keys {missing}, unknown keys {unknown}"
            )
        return replace(self, **{name: saved[key] for key, name in known.items()})

    def from_torch(self, saved: Mapping[str, Any]) -> Self:
        """These settings with what this rule can use of a state of ``torch.amp.GradScaler``, not :meth:`checked` yet.

        A rule other than torch's can use nothing: a constant stays, and one that follows gradients measures them anew.
        """
        return self


RULES: dict[str, type[ScaleRule]] = {}
"""The rules that a policy can name."""

Rule = TypeVar("Rule", bound=ScaleRule)


def register(rule: type[Rule]) -> type[Rule]:
    """Let policies name ``rule``; before :mod:`hf_mp.trainer` is imported, so that its help texts list it too."""
    RULES[rule.name] = rule
    return rule


class StaticRule(ScaleRule):
    """A constant scale: only counts. Not registered: a policy names it by its number."""

    name, summary = "static", "constant"


# The scale that follows the gradients

_LEAST_HEADROOM = 1.0  # doublings; learned headroom sinks no further
_FAST_ABOVE, _FAST = 4.0, 2.0  # headroom above the first sinks faster, by the second for each doubling above it
_ABOVE_SEEN = 0.5  # doublings that are kept above a rise that was seen
_ABOVE_UNSEEN = 1.25  # the headroom that an overflow adds whose gradient nothing shows
_FUTILE_HEADROOM = 12.0  # with so many doublings an overflow is not blamed on the scale, unless it returns at once
_FUTILE_ADDED = 10.0  # ... but no less than so many above that of the first scale
_AT_ONCE = 16  # an overflow that returns within so many clean steps is the scale's, whatever its headroom
_LARGEST_FALL = 8.0  # doublings that one step may count for: a batch of next to no gradient says little
_FIRST_SCALE = 2.0**16  # torch's; small gradients of weights ask for more, but those of activations may be far larger


@register
@dataclass(frozen=True)
class HeadroomRule(ScaleRule):
    """The algorithm in :class:`HeadroomLossScaler`'s docstring."""

    name, summary = "headroom", "follows the gradients"

    init_scale: float = setting(2.0**10)
    init_headroom: float = setting(5.0)
    half_life: float = setting(25, number("at least 1 step and finite", lambda x: 1 <= x < math.inf))
    backoff_factor: float = setting(2.0**-20, number("above 0 and below 1", lambda x: 0.0 < x < 1.0))
    patience: int = setting(250, whole(1))
    min_scale: float = setting(LEAST_USEFUL_SCALE, _check_min_scale)  # a power of two once checked, as max_scale
    max_scale: float = setting(2.0**40)
    largest: float = setting(FP16_MAX, number("a positive, finite number", lambda x: 0.0 < x < math.inf))

    scale: float = remembered(2.0**10, check_scale)
    # running geometric mean of the largest unscaled gradients; None until one was finite
    level: float | None = remembered(
        None,
        partial(
            check, "a positive, finite number or None", lambda x: x is None or (_is_number(x) and 0.0 < x < math.inf)
        ),
    )
    # doublings that are kept between the level and the largest number
    headroom: float = remembered(5.0, number("a finite number of doublings, at least 0", lambda x: 0.0 <= x < math.inf))
    is_futile: bool = remembered(  # whether there were overflows that headroom does not prevent
        False, partial(check, "True or False", lambda x: isinstance(x, bool))
    )
    quiet_steps: int = remembered(0, whole(0))  # clean ones since the last overflow that no gradient explained

    @property
    def floor(self) -> float:
        return self.min_scale

    def checked(self) -> Self:
        checked = super().checked()
        _check_max_scale(self.max_scale, self.min_scale)
        floor = -power_of_two_below(-max(self.min_scale, SMALLEST_SCALE))  # rounded up
        ceiling = power_of_two_below(min(self.max_scale, LARGEST_SCALE))
        if ceiling < floor:
            raise ValueError(f"no power of two lies between min_scale={self.min_scale} and max_scale={self.max_scale}")
        return replace(checked, min_scale=floor, max_scale=ceiling)

    def is_finding_its_level(self, clean_scale: float | None) -> bool:
        return self.scale > 1.0 and self.level is None

    def adjust(self, report: StepReport) -> Self:
        if report.overflow and not report.is_of_scale:  # which says nothing of the gradients
            return replace(self, steps=self.steps + 1)
        if report.overflow:
            # From above 1 no further than to 1, where next to all gradients fit.
            least = max(self.min_scale, 1.0 if self.scale > 1.0 else SMALLEST_SCALE)
            fallen = power_of_two_below(max(self.scale * self.backoff_factor, SMALLEST_SCALE))
            return self.counted(report, scale=max(fallen, min(least, self.scale)))
        largest = report.largest_gradient
        learned = self if largest is None or not 0.0 < largest < math.inf else self._learned(largest)
        if learned.level is not None:
            scale = scale_with_headroom(learned.level, learned.headroom, self.largest)
        elif largest == 0.0:  # nothing but zeros: FP16 may have lost the gradients at a scale that overflows led to
            scale = max(self.scale, min(self.scale / self.backoff_factor, self.init_scale))
        else:
            scale = self.scale
        return learned.counted(report, scale=max(min(scale, self.max_scale), self.min_scale))

    def _learned(self, largest: float) -> Self:
        """This value with a measured gradient taken in; the scale is not set yet."""
        if self.level is None:
            # A hair less headroom than the cap asks for, so that rounding does not halve the scale.
            capped = headroom_left(max(_FIRST_SCALE, self.init_scale), largest, self.largest) - 2.0**-20
            return replace(self, level=float(largest), headroom=max(self.headroom, capped))
        rise = math.log2(largest / self.level)
        if self.consecutive_skips and rise > self.headroom:
            return replace(self, level=float(largest))
        headroom, is_futile, quiet_steps = self.headroom, self.is_futile, self.quiet_steps + 1
        if not self.consecutive_skips:
            is_futile = is_futile and quiet_steps < 16 * self.patience
        elif self._overflow_was_futile(self.level):
            is_futile, quiet_steps = True, 0
        else:
            headroom, quiet_steps = headroom + _ABOVE_UNSEEN, 0
        sinking = 1.0 / (1 + 8 * self.skipped_steps)
        if is_futile or not self.skipped_steps:
            sinking = max(sinking, _FAST * (headroom - _FAST_ABOVE))
        sunk = headroom - sinking / self.patience
        headroom = max(sunk, rise + _ABOVE_SEEN, min(_LEAST_HEADROOM, self.init_headroom))
        weight = 1.0 - 0.5 ** (1.0 / self.half_life)
        level = self.level * 2.0 ** (weight * max(rise, -_LARGEST_FALL))
        return replace(self, level=level, headroom=headroom, is_futile=is_futile, quiet_steps=quiet_steps)

    def _overflow_was_futile(self, level: float) -> bool:
        """Whether more headroom would not have prevented an overflow that no gradient explains."""
        # Small gradients have much headroom from the beginning, by the first scale: what overflows have added counts.
        futile = max(_FUTILE_HEADROOM, headroom_left(_FIRST_SCALE, level, self.largest) + _FUTILE_ADDED)
        return self.quiet_steps >= _AT_ONCE and (self.is_futile or self.headroom >= futile)


@register
@dataclass(frozen=True)
class DynamicRule(ScaleRule):
    """torch's algorithm (the documentation of ``torch.amp.GradScaler``), with bounds and hysteresis."""

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
    hysteresis_left: int = remembered(1, whole(1))  # overflows until one lowers the scale, it included

    @property
    def floor(self) -> float:
        return to_fp32(max(self.min_scale, SMALLEST_SCALE))

    def checked(self) -> Self:
        checked = super().checked()
        _check_max_scale(self.max_scale, self.min_scale)
        return checked

    def is_finding_its_level(self, clean_scale: float | None) -> bool:
        was_clean = clean_scale is not None and self.scale <= clean_scale
        return self.scale > 1.0 and not was_clean and self.growth_tracker <= 0

    def from_torch(self, saved: Mapping[str, Any]) -> Self:
        fresh = {"consecutive_skips": 0, "hysteresis_left": self.hysteresis}
        return self.from_dict({**self.to_dict(), **fresh, **saved})

    def adjust(self, report: StepReport) -> Self:
        if report.overflow:
            if self.hysteresis_left > 1:
                spent = self.hysteresis_left - 1
                return self.counted(report, growth_tracker=-self.growth_delay, hysteresis_left=spent)
            # A scale that is below the floor already, because it was set there, stays.
            lowered = to_fp32(max(self.scale * self.backoff_factor, min(self.floor, self.scale)))
            return self.counted(report, scale=lowered, growth_tracker=-self.growth_delay)
        left = self.hysteresis if self.consecutive_hysteresis else self.hysteresis_left
        if (tracker := self.growth_tracker + 1) < self.growth_interval:
            return self.counted(report, growth_tracker=tracker, hysteresis_left=left)
        grown = to_fp32(self.scale * self.growth_factor)
        # torch keeps a scale that would leave FP32.
        grown = min(grown, max(self.max_scale, self.scale)) if math.isfinite(grown) else self.scale
        return self.counted(report, scale=grown, growth_tracker=0, hysteresis_left=self.hysteresis)


def parse_loss_scale(value: str | float | None) -> str | float | None:
    """Read a loss scale.

    Args:
        value: the name of a rule (:data:`RULES`: ``"headroom"``, ``"dynamic"``), ``"none"``, a
            positive number or its text, or None.

    Raises:
        ValueError: for any other text, and for zero, negative, infinite and NaN numbers.
    """
    if value is None or value == "none":
        return None
    if isinstance(value, str) and value in RULES:
        return value
    try:
        scale = float("" if isinstance(value, bool) else value)
    except (ValueError, TypeError, OverflowError):
        names = ", ".join(map(repr, (*RULES, "none")))
        raise ValueError(f"loss_scale={value!r} is not known: use {names} or a positive number") from None
    if not 0.0 < scale < float("inf"):
        raise ValueError(f"loss_scale={value!r} must be a positive, finite number (a power of two keeps scaling exact)")
    return scale


# Numbers


def scale_with_headroom(magnitude: float, headroom: float, largest: float = FP16_MAX) -> float:
    """The largest power of two S for which ``S * magnitude * 2**headroom`` is at most ``largest``."""
    return power_of_two_below(largest / magnitude * 2.0**-headroom)


def power_of_two_below(value: float) -> float:
    """The largest power of two that is at most ``value``; for a negative ``value``, the largest ``-(2**k)``."""
    mantissa, exponent = math.frexp(value)
    return math.ldexp(0.5, exponent) if value > 0.0 else -math.ldexp(0.5, exponent + (mantissa != -0.5))


def to_fp32(value: float) -> float:
    """``value`` rounded to FP32, in which torch keeps a loss scale; ``inf`` beyond its range."""
    return ctypes.c_float(value).value


def headroom_left(scale: float, magnitude: float, largest: float = FP16_MAX) -> float:
    """How many doublings ``scale`` could take until a finite ``magnitude`` overflows: log2(largest / (S * m))."""
    return math.log2(largest / (scale * magnitude)) if magnitude > 0.0 else math.inf


def scale_text(scale: float) -> str:
    """A loss scale as all messages and pages write it: ``16384``, or ``2^20`` and ``2^-14`` where digits are many."""
    if float(scale).is_integer() and scale < 1e6:
        return f"{scale:.0f}"
    mantissa, exponent = math.frexp(scale)
    return f"2^{exponent - 1}" if mantissa == 0.5 else f"{scale:g}"


@dataclass(frozen=True)
class PrecisionStats:
    """What mixed precision did so far in this process.

    The steps of several optimizers between two backwards count as one.

    Attributes:
        steps: optimizer steps, skipped ones included.
        skipped_steps: of those, the ones skipped for an overflow, by at least one optimizer.
        loss_scale: the loss scale in force; 1.0 where nothing is scaled.
        loss_scale_first: the loss scale of the first step.
        loss_scale_min: the smallest that a step used.
        loss_scale_max: the largest that a step used.
        headroom: doublings of the scale that were left before an overflow, at the last clean step; None if not
            measured.
        remedies: the rules that ``on_overflow="heal"`` put in place, as ``"module:op: rule"``.
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
        """The entries for a training log: ``loss_scale``, ``skipped_steps``, and ``remedies``, ``headroom`` if any."""
        # An int where it is whole: the Trainer prints floats with four digits, 16384 as 1.638e+04.
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
        """The stats with one more step, which ran at ``used_scale``."""
        largest = report.largest_gradient  # None for an overflow
        return replace(
            self,
            steps=self.steps + 1,
            skipped_steps=self.skipped_steps + report.overflow,
            loss_scale=next_scale,
            loss_scale_min=min(self.loss_scale_min, used_scale),
            loss_scale_max=max(self.loss_scale_max, used_scale),
            headroom=headroom_left(next_scale, largest) if largest else self.headroom,  # none for gradients of zero
        )
