"""The loss scalers: pure rules that turn what a step saw into the next scale, and the shells that hold their state.

A scaler is told once per optimizer step whether a gradient overflowed and how large the largest gradient was
(:meth:`LossScaler.record_step`). The rules themselves (:func:`adjust_dynamic`, :func:`adjust_headroom`) are functions
of frozen values and need no model, Trainer or GPU.
"""

from __future__ import annotations

import copy
import inspect
import math
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, ClassVar, Generic, NamedTuple, Self, TypeVar

import torch
from torch import Tensor

from hf_mp.policy import LossScaleKind, parse_loss_scale

FP16_MAX = torch.finfo(torch.float16).max  # 65504
_FP32_MAX = torch.finfo(torch.float32).max
_SMALLEST_SCALE = 2.0**-126  # its inverse is finite in FP32
_LARGEST_SCALE = 2.0**127


class LossScaleError(RuntimeError):
    """Training cannot go on: gradients overflow even at the smallest loss scale allowed."""


@dataclass(frozen=True)
class StepReport:
    """What one optimizer step saw.

    Attributes:
        overflow: whether a gradient was inf or NaN, so that the update was not applied.
        largest_gradient: largest magnitude among the unscaled gradients before clipping; None if it was not measured.
    """

    overflow: bool
    largest_gradient: float | None = None


@dataclass(frozen=True)
class ScalerState:
    """What every scaler remembers between steps; its fields are its saved state.

    Attributes:
        scale: the loss scale in force.
        steps: optimizer steps recorded, skipped ones included.
        skipped_steps: of those, the ones that were skipped.
        consecutive_skips: skipped steps since the last applied one.
    """

    scale: float
    steps: int = 0
    skipped_steps: int = 0
    consecutive_skips: int = 0


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
    """As :class:`ScalerState`, with ``growth_tracker``: clean steps since the scale last changed."""

    growth_tracker: int = 0
    hysteresis_left: int = 1


@dataclass(frozen=True)
class DynamicSettings:
    """Settings of :func:`adjust_dynamic`; see :class:`DynamicLossScaler`."""

    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    hysteresis: int = 1
    min_scale: float = 1.0
    max_scale: float | None = None

    def __post_init__(self) -> None:
        _check_above(growth_factor=(self.growth_factor, 1.0), backoff_factor=(self.backoff_factor, 0.0))
        if self.backoff_factor >= 1.0:
            raise ValueError(f"backoff_factor={self.backoff_factor} must be below 1.0, so that an overflow lowers it")
        if self.growth_interval < 1 or self.hysteresis < 1:
            raise ValueError(
                f"growth_interval={self.growth_interval} and hysteresis={self.hysteresis} must be at least 1 step"
            )
        _check_bounds(self.min_scale, self.max_scale)


def adjust_dynamic(state: DynamicState, settings: DynamicSettings, report: StepReport) -> DynamicState:
    """One update of torch's algorithm (the documentation of ``torch.amp.GradScaler``), with bounds and hysteresis."""
    state = count_step(state, report)
    if report.overflow:
        if state.hysteresis_left > 1:
            return replace(state, growth_tracker=0, hysteresis_left=state.hysteresis_left - 1)
        return replace(
            state, scale=_lowered(state.scale, settings.backoff_factor, settings.min_scale), growth_tracker=0
        )
    tracker = state.growth_tracker + 1
    if tracker < settings.growth_interval:
        return replace(state, growth_tracker=tracker)
    grown = state.scale * settings.growth_factor
    if not math.isfinite(grown) or grown > _FP32_MAX:  # torch keeps a scale that would leave FP32
        grown = state.scale
    if settings.max_scale is not None:
        grown = min(grown, max(settings.max_scale, state.scale))
    return replace(state, scale=grown, growth_tracker=0, hysteresis_left=settings.hysteresis)


def _lowered(scale: float, factor: float, min_scale: float) -> float:
    """``scale`` times ``factor``, but not below the smallest scale; a scale that is below it already stays."""
    return max(scale * factor, min(max(min_scale, _SMALLEST_SCALE), scale))


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
        if not 0.0 <= self.headroom <= 30.0:
            raise ValueError(f"headroom={self.headroom} must be 0 to 30 doublings (FP16 has 40 in all)")
        if self.half_life < 1 or self.ceiling_interval < 1:
            raise ValueError(
                f"half_life={self.half_life} and ceiling_interval={self.ceiling_interval} must be at least 1 step"
            )
        for name in ("backoff_factor", "calibration_backoff_factor"):
            if not 0.0 < getattr(self, name) < 1.0:
                raise ValueError(f"{name}={getattr(self, name)} must lie between 0 and 1")
        _check_bounds(self.min_scale, self.max_scale)


def adjust_headroom(state: HeadroomState, settings: HeadroomSettings, report: StepReport) -> HeadroomState:
    """One update of the algorithm in :class:`HeadroomLossScaler`'s docstring."""
    state = count_step(state, report)
    if report.overflow:
        factor = settings.calibration_backoff_factor if state.peak is None else settings.backoff_factor
        lowered = _lowered(state.scale, factor, settings.min_scale)
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
    upper = min(_LARGEST_SCALE, settings.max_scale or _LARGEST_SCALE)
    if ceiling is not None and ceiling >= upper:
        ceiling = None  # it no longer bounds anything
    scale = min(scale, power_of_two_below(upper if ceiling is None else ceiling))
    scale = max(scale, -power_of_two_below(-max(settings.min_scale, _SMALLEST_SCALE)))
    return replace(state, scale=scale, peak=peak, ceiling=ceiling, clean_steps=clean_steps)


def scale_with_headroom(magnitude: float, headroom: float) -> float:
    """The largest power of two S for which ``S * magnitude * 2**headroom`` is still finite in FP16."""
    return power_of_two_below(FP16_MAX / magnitude * 2.0**-headroom)


def power_of_two_below(value: float) -> float:
    """The largest power of two that is at most ``value``; for a negative value, of the negative ones."""
    mantissa, exponent = math.frexp(value)
    return math.ldexp(0.5, exponent) if value > 0.0 else -math.ldexp(0.5, exponent + (mantissa != -0.5))


def headroom_left(scale: float, magnitude: float) -> float:
    """How many doublings ``scale`` could still take before a finite ``magnitude`` overflows: log2(65504 / (S * m))."""
    return math.log2(FP16_MAX / (scale * magnitude)) if magnitude > 0.0 else math.inf


class ScaleTensors(NamedTuple):
    """The loss scale and its inverse: FP32, of shape (1,), so that their products with FP16 are FP32."""

    scale: Tensor
    inverse: Tensor


class NoScaleTensors(NamedTuple):
    """In the place of :class:`ScaleTensors` where nothing is scaled."""

    scale: None = None
    inverse: None = None


class LossScaler(Generic[State]):
    """What all scalers share: the scale as a number and as tensors, the step record, the saved state."""

    kind: ClassVar[str]
    needs_largest_gradient: ClassVar[bool] = False

    def __init__(self, state: State, *, max_consecutive_skips: int, min_scale: float) -> None:
        if max_consecutive_skips < 1:
            raise ValueError(f"max_consecutive_skips={max_consecutive_skips} must be at least 1 step")
        self._state = state
        self._max_consecutive_skips = max_consecutive_skips
        self._min_scale = min_scale
        self._tensors: dict[torch.device, ScaleTensors] = {}

    @property
    def state(self) -> State:
        """What the scaler remembers; a frozen value."""
        return self._state

    @state.setter
    def state(self, state: State) -> None:
        self._state = state
        for tensors in self._tensors.values():
            tensors.scale.fill_(state.scale)
            tensors.inverse.fill_(1.0 / state.scale)

    def adjust(self, report: StepReport) -> State:
        """The state after a step; the scaler itself is unchanged."""
        raise NotImplementedError

    def get_scale(self) -> float:
        """The loss scale in force."""
        return self.state.scale

    def scale_tensors(self, device: torch.device) -> ScaleTensors:
        """The scale and its inverse on ``device``, which follow the scale from now on without being asked for again."""
        if device not in self._tensors:
            with torch.inference_mode(False):  # generate() may be the first to ask
                scale = torch.tensor([self.state.scale], dtype=torch.float32, device=device)
                tensors = ScaleTensors(scale, 1.0 / scale)
            if type(scale) is not Tensor:  # a fake one, of memory estimation
                return tensors
            self._tensors[device] = tensors
        return self._tensors[device]

    def factors(self, device: torch.device) -> ScaleTensors | NoScaleTensors:
        """As :meth:`scale_tensors`, for whoever would multiply by them: none of them for a constant scale of 1."""
        return self.scale_tensors(device)

    def copy(self) -> Self:
        """A scaler of the same settings and state that goes its own way."""
        copied = copy.copy(self)
        copied._tensors = {}
        return copied

    def record_step(self, report: StepReport) -> None:
        """Take in what an optimizer step saw and set the next scale.

        Raises:
            LossScaleError: after ``max_consecutive_skips`` skipped steps in a row at the smallest scale.
        """
        used_scale = self.state.scale
        self.state = self.adjust(report)
        skips = self.state.consecutive_skips
        if skips >= self._max_consecutive_skips and used_scale <= self._min_scale:
            raise LossScaleError(
                f"{skips} optimizer steps in a row were skipped (since step {self.state.steps - skips + 1}): gradients "
                f"are inf or NaN even at loss scale {self.state.scale:g}, the smallest allowed. The model or its data "
                "makes them, not the scale: look for NaN in the inputs, lower the learning rate, or train in bf16"
            )

    def state_dict(self) -> dict[str, Any]:
        """The state as plain numbers, for JSON."""
        return {"kind": self.kind, **asdict(self.state)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state that :meth:`state_dict` gave.

        Raises:
            ValueError: for the state of another kind of scaler, missing or unknown keys, or a scale that is no scale.
        """
        given = {key: value for key, value in state_dict.items() if key != "kind"}
        known = {field.name for field in fields(self.state)}
        if state_dict.get("kind") != self.kind or set(given) != known:
            raise ValueError(
                f"this state is not one of a {self.kind!r} loss scaler: got kind={state_dict.get('kind')!r} with "
                f"{sorted(given)}, expected {sorted(known)}"
            )
        _check_scale(given["scale"])
        for key, value in given.items():
            if isinstance(value, bool) or not isinstance(value, (int, float, type(None))):
                raise ValueError(f"{key}={value!r} in the state of a {self.kind!r} loss scaler is not a number")
        self.state = type(self.state)(**given)


class StaticLossScaler(LossScaler[ScalerState]):
    """A constant loss scale (Micikevicius et al. 2017, section 3.2); steps that overflow are skipped all the same.

    Args:
        scale: the loss scale; a power of two keeps scaling exact. 1 means no scaling.
        max_consecutive_skips: skipped steps in a row after which :class:`LossScaleError` is raised; default 50.

    Raises:
        ValueError: for a scale that is not positive and finite.
    """

    kind = "static"

    def __init__(self, scale: float, *, max_consecutive_skips: int = 50) -> None:
        _check_scale(scale)
        super().__init__(ScalerState(float(scale)), max_consecutive_skips=max_consecutive_skips, min_scale=scale)

    def factors(self, device: torch.device) -> ScaleTensors | NoScaleTensors:
        return NoScaleTensors() if self.state.scale == 1.0 else self.scale_tensors(device)

    def adjust(self, report: StepReport) -> ScalerState:
        return count_step(self.state, report)


class DynamicLossScaler(LossScaler[DynamicState]):
    """torch's dynamic loss scale: halved on an overflow, doubled after ``growth_interval`` clean steps.

    Algorithm of ``torch.amp.GradScaler`` (its documentation; Micikevicius et al. 2017, section 3.2)::

        overflow:  scale *= backoff_factor; tracker = 0
        clean:     tracker += 1
                   if tracker == growth_interval: scale *= growth_factor; tracker = 0

    Args:
        init_scale: scale of the first step; default 2**16.
        growth_factor: above 1; default 2.
        backoff_factor: between 0 and 1; default 0.5.
        growth_interval: clean steps before the scale grows; default 2000.
        hysteresis: overflows tolerated before the scale is lowered; default 1 lowers it at once.
        min_scale: the scale is not lowered below this; default 1.
        max_scale: the scale does not grow above this; default None, no bound but FP32's.
        max_consecutive_skips: skipped steps in a row at ``min_scale`` after which :class:`LossScaleError` is raised.

    Raises:
        ValueError: for settings outside these ranges.
    """

    kind = "dynamic"

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        *,
        hysteresis: int = 1,
        min_scale: float = 1.0,
        max_scale: float | None = None,
        max_consecutive_skips: int = 50,
    ) -> None:
        _check_scale(init_scale)
        self.settings = DynamicSettings(
            growth_factor, backoff_factor, growth_interval, hysteresis, min_scale, max_scale
        )
        state = DynamicState(float(init_scale), hysteresis_left=hysteresis)
        super().__init__(state, max_consecutive_skips=max_consecutive_skips, min_scale=min_scale)

    def adjust(self, report: StepReport) -> DynamicState:
        return adjust_dynamic(self.state, self.settings, report)


class HeadroomLossScaler(LossScaler[HeadroomState]):
    """A loss scale that follows the gradients instead of probing for an overflow.

    The largest gradient magnitude of each step is known from the pass that looks for inf and NaN, so the scale can be
    computed: Micikevicius et al. 2017 (section 3.2) choose it such that its product with the maximum absolute
    gradient stays below 65504, and NVIDIA's "Train With Mixed Precision" guide ("Choosing A Scaling Factor") says the
    same. Here that choice is made again at every step::

        clean step with largest unscaled gradient g:
            peak  = max(g, peak * 2**(-1/half_life))
            scale = largest power of two with scale * peak * 2**headroom <= 65504
            scale = min(scale, ceiling); ceiling doubles after ceiling_interval clean steps
        overflow:
            scale *= backoff_factor; ceiling = scale

    The first backward runs at ``init_scale``, which is low: it can hardly overflow, and what it measures sets the scale
    of the second step. Until then an overflow lowers the scale by ``calibration_backoff_factor``. The ceiling is for
    overflows that weight gradients do not announce (an activation's gradient overflowed, the sums over it did not).

    Args:
        init_scale: scale of the first step; default 2**10.
        headroom: doublings kept between the largest recent gradient and FP16's largest number; default 6.
        half_life: steps after which an old peak counts half; default 100.
        backoff_factor: factor on an overflow; default 0.5.
        min_scale, max_scale: bounds of the scale; default 2**-14 and 2**40.
        ceiling_interval: clean steps before the ceiling doubles; default 2000.
        max_consecutive_skips: skipped steps in a row at ``min_scale`` after which :class:`LossScaleError` is raised.

    Raises:
        ValueError: for settings outside their ranges.
    """

    kind = "headroom"
    needs_largest_gradient = True

    def __init__(
        self,
        init_scale: float = 2.0**10,
        headroom: float = 6.0,
        half_life: int = 100,
        *,
        backoff_factor: float = 0.5,
        min_scale: float = 2.0**-14,
        max_scale: float | None = 2.0**40,
        ceiling_interval: int = 2000,
        max_consecutive_skips: int = 50,
    ) -> None:
        _check_scale(init_scale)
        self.settings = HeadroomSettings(
            headroom=headroom,
            half_life=half_life,
            backoff_factor=backoff_factor,
            ceiling_interval=ceiling_interval,
            min_scale=min_scale,
            max_scale=max_scale,
        )
        state = HeadroomState(float(init_scale))
        super().__init__(state, max_consecutive_skips=max_consecutive_skips, min_scale=min_scale)

    def adjust(self, report: StepReport) -> HeadroomState:
        return adjust_headroom(self.state, self.settings, report)


def make_loss_scaler(loss_scale: LossScaleKind | float | None, **settings: Any) -> LossScaler[Any]:
    """The scaler that a policy's ``loss_scale`` names.

    Args:
        loss_scale: ``"headroom"``, ``"dynamic"``, a number (static) or None (static 1: only the guard remains).
        settings: keyword arguments of that scaler's class.

    Raises:
        ValueError: for a setting that this scaler does not have; the message lists those it has.
    """
    kind = parse_loss_scale(loss_scale)
    if isinstance(kind, str):
        return _make(SCALERS[kind], {}, settings)
    return _make(StaticLossScaler, {"scale": 1.0 if kind is None else kind}, settings)


SCALERS: dict[str, type[LossScaler[Any]]] = {"headroom": HeadroomLossScaler, "dynamic": DynamicLossScaler}


def _make(scaler: type[LossScaler[Any]], fixed: dict[str, Any], settings: dict[str, Any]) -> LossScaler[Any]:
    allowed = sorted(set(inspect.signature(scaler).parameters) - set(fixed))
    unknown = sorted(set(settings) - set(allowed))
    if unknown:
        raise ValueError(
            f"the {scaler.kind!r} loss scaler has no setting {', '.join(unknown)}: it has {', '.join(allowed)}"
        )
    return scaler(**fixed, **settings)


def _check_scale(scale: float) -> None:
    if isinstance(scale, bool) or not isinstance(scale, (int, float)) or not 0.0 < scale < math.inf:
        raise ValueError(f"a loss scale must be a positive, finite number, not {scale!r}")
    if not _SMALLEST_SCALE <= scale <= _FP32_MAX:
        raise ValueError(f"a loss scale must lie between 2**-126 and {_FP32_MAX:.4g}, FP32's range, not {scale!r}")


def _check_above(**limits: tuple[float, float]) -> None:
    for name, (value, limit) in limits.items():
        if not value > limit:
            raise ValueError(f"{name}={value} must be above {limit}")


def _check_bounds(min_scale: float, max_scale: float | None) -> None:
    if not 0.0 < min_scale < math.inf:
        raise ValueError(f"min_scale={min_scale} must be a positive, finite number: a scale never becomes 0")
    if max_scale is not None and not max_scale >= min_scale:
        raise ValueError(f"max_scale={max_scale} must be at least min_scale={min_scale}")


__all__ = [
    "DynamicLossScaler",
    "DynamicSettings",
    "DynamicState",
    "HeadroomLossScaler",
    "HeadroomSettings",
    "HeadroomState",
    "LossScaleError",
    "LossScaler",
    "ScaleTensors",
    "ScalerState",
    "StaticLossScaler",
    "StepReport",
    "adjust_dynamic",
    "adjust_headroom",
    "headroom_left",
    "make_loss_scaler",
    "scale_with_headroom",
]
