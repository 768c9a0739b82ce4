"""The loss scalers: what keeps the state of a loss scale, and the shells around the rules that adjust it.

A scaler is told once per optimizer step whether a gradient overflowed and how large the largest gradient was
(:meth:`LossScaler.record_step`); the rules themselves are in :mod:`hf_mp.scaling.rules`. Scalers also have the
explicit methods of ``torch.amp.GradScaler`` (:mod:`hf_mp.scaling.explicit`).
"""

from __future__ import annotations

import copy
import inspect
import math
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields, replace
from typing import Any, ClassVar, Generic, NamedTuple, Self

import torch
from torch import Tensor

from hf_mp.policy import LossScaleKind, parse_loss_scale
from hf_mp.scaling.explicit import ExplicitScaling
from hf_mp.scaling.rules import (
    FP16_MAX,
    DynamicSettings,
    DynamicState,
    HeadroomSettings,
    HeadroomState,
    ScalerState,
    State,
    StepReport,
    adjust_dynamic,
    adjust_headroom,
    check_scale,
    check_whole,
    count_step,
    headroom_left,
    is_power_of_two,
    power_of_two_below,
    scale_with_headroom,
    to_fp32,
)


class LossScaleError(RuntimeError):
    """Training cannot go on: gradients overflow even at the smallest loss scale allowed.

    Raised by ``optimizer.step()``, or by ``update()`` of a scaler, after ``max_consecutive_skips`` skipped steps in a
    row. The message names the step since which, the scale, and some of the gradients that are not finite.
    """


class ScaleTensors(NamedTuple):
    """The loss scale and its inverse: FP32, of shape (1,), so that their products with FP16 are FP32."""

    scale: Tensor
    inverse: Tensor


# what torch.amp.GradScaler.state_dict() holds
_TORCH_SETTINGS = ("growth_factor", "backoff_factor", "growth_interval")
_TORCH_KEYS = ("scale", *_TORCH_SETTINGS, "_growth_tracker")


class LossScaler(ExplicitScaling, Generic[State]):
    """What all scalers share: the methods of ``torch.amp.GradScaler``, and a saved state of plain numbers.

    A disabled scaler (``enabled=False``) passes losses through, never skips, and saves an empty state.
    """

    kind: ClassVar[str]

    def __init__(self, state: State, *, max_consecutive_skips: int, min_scale: float, enabled: bool = True) -> None:
        check_whole(1, max_consecutive_skips=max_consecutive_skips)
        if not isinstance(enabled, (bool, int)):
            raise TypeError(f"enabled={enabled!r} must be True or False")
        self._state = state
        self._max_consecutive_skips = max_consecutive_skips
        self._min_scale = to_fp32(min_scale)
        self._enabled = enabled
        self._was_asked_to_scale = False
        self._tensors: dict[torch.device, ScaleTensors] = {}
        self._begin_iteration()

    @property
    def state(self) -> State:
        """What the scaler remembers; a frozen value."""
        return self._state

    @state.setter
    def state(self, state: State) -> None:
        changed, self._state = state.scale != self._state.scale, state
        if not changed:
            return
        for tensors in self._tensors.values():
            tensors.scale.fill_(state.scale)
            tensors.inverse.fill_(1.0 / state.scale)

    def adjust(self, report: StepReport) -> State:
        """The state after a step; the scaler itself is unchanged."""
        raise NotImplementedError

    def get_scale(self) -> float:
        """The loss scale in force; 1.0 for a disabled scaler."""
        return self.state.scale if self._enabled else 1.0

    @property
    def smallest_scale(self) -> float:
        """The smallest scale that overflows can lower this one to."""
        return self._min_scale

    def scale_tensors(self, device: torch.device) -> ScaleTensors:
        """The scale and its inverse on ``device``, which follow the scale from now on without being asked for again."""
        if device not in self._tensors:
            with torch.inference_mode(False):  # generate() may be the first to ask
                scale = torch.tensor([self.get_scale()], dtype=torch.float32, device=device)
                tensors = ScaleTensors(scale, 1.0 / scale)
            if type(scale) is not Tensor:  # a fake one, of memory estimation
                return tensors
            self._tensors[device] = tensors
        return self._tensors[device]

    @property
    def is_scaling(self) -> bool:
        """Whether there is anything to multiply by: not for a constant scale of 1, or a disabled scaler."""
        return self._enabled

    def copy(self) -> Self:
        """A scaler of the same settings and state that goes its own way."""
        return copy.deepcopy(self)

    def record_step(self, report: StepReport, nonfinite: Callable[[], Sequence[str]] = tuple) -> None:
        """Take in what an optimizer step saw and set the next scale.

        Args:
            report: what the step saw.
            nonfinite: names the gradients that were not finite; called only for the error's message.

        Raises:
            LossScaleError: after ``max_consecutive_skips`` skipped steps in a row at the smallest scale.
        """
        if not self._enabled:
            return
        gives_up = report.overflow and self._skips_once_too_often()
        self.state = self.adjust(report)
        if gives_up:
            skips = self.state.consecutive_skips
            scale = self.state.scale
            where = (
                " without loss scaling"
                if scale == 1.0 and self.kind == "static"
                else (f" even at loss scale {scale:g}, the smallest allowed")
            )
            raise LossScaleError(
                f"{skips} optimizer steps in a row were skipped (since step {self.state.steps - skips + 1}): gradients "
                f"are inf or NaN{where}{_listed(nonfinite())}. The model or its data makes them, not the scale: look "
                "for NaN in the inputs, lower the learning rate, or train in a precision of wider range"
            )

    def _skips_once_too_often(self) -> bool:
        skips = self.state.consecutive_skips + 1
        return skips >= self._max_consecutive_skips and self.state.scale <= self._min_scale

    def state_dict(self) -> dict[str, Any]:
        """The state as plain numbers, for JSON; empty for a disabled scaler."""
        return {"kind": self.kind, **asdict(self.state)} if self._enabled else {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over a state that :meth:`state_dict` gave, or that of a ``torch.amp.GradScaler``.

        A disabled scaler takes nothing over, as torch's.

        Raises:
            ValueError: for the state of another kind of scaler, missing or unknown keys, values that are no numbers,
                or a scale that is no scale.
            RuntimeError: for the empty state of a scaler that was disabled.
        """
        if not self._enabled:
            return
        if not isinstance(state_dict, Mapping):
            raise TypeError(f"the state of a loss scaler is a mapping, not a {type(state_dict).__name__}")
        if not state_dict:
            raise RuntimeError(
                "the state is empty, as that of a disabled scaler is: resume without it, or disable this one"
            )
        if set(state_dict) == set(_TORCH_KEYS):
            check_scale(state_dict["scale"])
            self._take_over_torch(state_dict)
        else:
            self._check_keys(state_dict)
            self._take_over(state_dict)
        self._warn_if_inexact(scale=self.state.scale)

    def _take_over_torch(self, state_dict: Mapping[str, Any]) -> None:
        raise NotImplementedError

    def _take_over(self, state_dict: Mapping[str, Any]) -> None:
        self.state = type(self.state)(**{name: state_dict[name] for name in self._state_keys()})

    def _state_keys(self) -> set[str]:
        return {field.name for field in fields(self.state)}

    def _check_keys(self, state_dict: Mapping[str, Any]) -> None:
        given, known = set(state_dict) - {"kind"}, self._state_keys()
        if state_dict.get("kind") != self.kind or given != known:
            missing, unknown = sorted(known - given), sorted(given - known, key=str)
            raise ValueError(
                f"this state is neither one of a {self.kind!r} loss scaler nor of a torch.amp.GradScaler: "
                f"kind={state_dict.get('kind')!r}, missing keys {missing}, unknown keys {unknown}"
            )

    def _set_scale(self, new_scale: float | Tensor) -> None:
        if isinstance(new_scale, Tensor):
            if new_scale.numel() != 1 or new_scale.requires_grad:
                raise ValueError(
                    f"new_scale must be a number or a tensor of one element without requires_grad, not one of shape "
                    f"{tuple(new_scale.shape)} with requires_grad={new_scale.requires_grad}"
                )
            new_scale = new_scale.item()
        self.state = replace(self.state, scale=new_scale)
        self._warn_if_inexact(new_scale=self.state.scale)

    def _warn_if_inexact(self, **values: float | None) -> None:
        """Warn, at the user's line, about a scale or factor that makes scaling round gradients."""
        for name, value in values.items():
            if not self._enabled or value is None or math.isinf(value) or is_power_of_two(value):
                continue
            if name == "backoff_factor" and value <= 0.0:
                _warn(f"{name}={value}: the first overflow takes the loss scale down to min_scale")
            else:
                _warn(f"{name}={value} is no power of two: scaling and unscaling then round gradients")

    def __getstate__(self) -> dict[str, Any]:
        if self._stages:
            raise RuntimeError("a loss scaler is pickled between update() and the next unscale_() or step() only")
        return {**self.__dict__, "_tensors": {}}


def _listed(names: Sequence[str], limit: int = 5) -> str:
    if not names:
        return ""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return f" (not finite: {', '.join(names[:limit])}{more})"


def _warn(message: str) -> None:
    """A warning at the first line outside this package, so that Python's filters show it once for each such line."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "hf_mp":
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)


class StaticLossScaler(LossScaler[ScalerState]):
    """A constant loss scale (Micikevicius et al. 2017, section 3.2); steps that overflow are skipped all the same.

    Args:
        scale: the loss scale; a power of two keeps scaling exact. 1 means no scaling.
        max_consecutive_skips: skipped steps in a row after which :class:`LossScaleError` is raised; default 50.
        enabled: False makes every method pass through; default True.

    Raises:
        ValueError: for a scale that is not positive and finite.
    """

    kind = "static"

    def __init__(self, scale: float, *, max_consecutive_skips: int = 50, enabled: bool = True) -> None:
        state = ScalerState(scale)
        super().__init__(state, max_consecutive_skips=max_consecutive_skips, min_scale=state.scale, enabled=enabled)
        self._warn_if_inexact(scale=state.scale)

    @property
    def is_scaling(self) -> bool:
        return self._enabled and self.state.scale != 1.0

    def adjust(self, report: StepReport) -> ScalerState:
        return count_step(self.state, report)

    def _take_over_torch(self, state_dict: Mapping[str, Any]) -> None:
        _warn(
            f"a constant loss scale of {self.state.scale:g} stays: the saved one of {state_dict['scale']:g} is dropped"
        )


class DynamicLossScaler(LossScaler[DynamicState]):
    """torch's dynamic loss scale: halved on an overflow, doubled after ``growth_interval`` clean steps.

    Algorithm of ``torch.amp.GradScaler`` (its documentation; Micikevicius et al. 2017, section 3.2)::

        overflow:  scale *= backoff_factor; tracker = 0
        clean:     tracker += 1
                   if tracker == growth_interval: scale *= growth_factor; tracker = 0

    Args:
        init_scale: scale of the first step; default 2**16.
        growth_factor: above 1; default 2.
        backoff_factor: below 1; default 0.5.
        growth_interval: clean steps before the scale grows; default 2000.
        hysteresis: overflows that it takes to lower the scale; default 1 lowers it at once. Every further one lowers
            it too, until the scale grows: that restores the count, as in Megatron-LM (``--hysteresis``) and DeepSpeed.
        consecutive_hysteresis: a clean step restores the count as well, so that only overflows in a row lower the
            scale, as DeepSpeed's setting of that name and NeMo's scaler do; default False.
        min_scale: the scale is not lowered below this; default 1.
        max_scale: the scale does not grow above this; default None, no bound but FP32's.
        max_consecutive_skips: skipped steps in a row at ``min_scale`` after which :class:`LossScaleError` is raised;
            default 50.
        enabled: False makes every method pass through, as with torch's.

    A factor or scale that is no power of two is allowed, as in torch, with a warning: scaling then rounds. A negative
    ``backoff_factor`` ends at ``min_scale``, where torch's scale turns negative.

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
        consecutive_hysteresis: bool = False,
        min_scale: float = 1.0,
        max_scale: float | None = None,
        max_consecutive_skips: int = 50,
        enabled: bool = True,
    ) -> None:
        self.settings = DynamicSettings(
            growth_factor, backoff_factor, growth_interval, hysteresis, min_scale, max_scale, consecutive_hysteresis
        )
        state = DynamicState(init_scale, hysteresis_left=hysteresis)
        super().__init__(state, max_consecutive_skips=max_consecutive_skips, min_scale=min_scale, enabled=enabled)
        self._warn_if_inexact(
            init_scale=state.scale,
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            min_scale=min_scale,
            max_scale=max_scale,
        )

    def adjust(self, report: StepReport) -> DynamicState:
        return adjust_dynamic(self.state, self.settings, report)

    def state_dict(self) -> dict[str, Any]:
        """The five entries of ``torch.amp.GradScaler.state_dict()``, which torch's scaler loads, and ours besides."""
        if not self._enabled:
            return {}
        values = super().state_dict()
        tracker = values.pop("growth_tracker")
        return {
            **values,
            **{name: getattr(self.settings, name) for name in _TORCH_SETTINGS},
            "_growth_tracker": tracker,
        }

    def _take_over_torch(self, state_dict: Mapping[str, Any]) -> None:
        fresh = {"consecutive_skips": 0, "hysteresis_left": self.settings.hysteresis}
        self._take_over({**asdict(self.state), **fresh, **state_dict})

    def _take_over(self, state_dict: Mapping[str, Any]) -> None:
        settings = replace(self.settings, **{name: state_dict[name] for name in _TORCH_SETTINGS})
        values = {name: state_dict[name] for name in super()._state_keys() - {"growth_tracker"}}
        self.state = DynamicState(**values, growth_tracker=state_dict["_growth_tracker"])
        self.settings = settings
        self._warn_if_inexact(growth_factor=settings.growth_factor, backoff_factor=settings.backoff_factor)

    def _state_keys(self) -> set[str]:
        return super()._state_keys() - {"growth_tracker"} | set(_TORCH_KEYS)

    def get_growth_factor(self) -> float:
        """The factor by which the scale grows."""
        return self.settings.growth_factor

    def set_growth_factor(self, new_factor: float) -> None:
        """Set the factor by which the scale grows; above 1."""
        self.settings = replace(self.settings, growth_factor=new_factor)
        self._warn_if_inexact(growth_factor=new_factor)

    def get_backoff_factor(self) -> float:
        """The factor by which an overflow lowers the scale."""
        return self.settings.backoff_factor

    def set_backoff_factor(self, new_factor: float) -> None:
        """Set the factor by which an overflow lowers the scale; below 1."""
        self.settings = replace(self.settings, backoff_factor=new_factor)
        self._warn_if_inexact(backoff_factor=new_factor)

    def get_growth_interval(self) -> int:
        """Clean steps before the scale grows."""
        return self.settings.growth_interval

    def set_growth_interval(self, new_interval: int) -> None:
        """Set the number of clean steps before the scale grows; at least 1.

        If more steps than that were clean already, the next one lets the scale grow. (torch's would not grow again
        until an overflow: it waits for equality.)
        """
        self.settings = replace(self.settings, growth_interval=new_interval)


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
        min_scale: the scale is not lowered below this; default 2**-14.
        max_scale: the scale does not grow above this; default 2**40, None for no bound but FP32's.
        ceiling_interval: clean steps before the ceiling doubles; default 2000.
        max_consecutive_skips: skipped steps in a row at ``min_scale`` after which :class:`LossScaleError` is raised;
            default 50.
        enabled: False makes every method pass through; default True.

    The scale is a power of two from its first update on, whatever the settings are: bounds that are none are taken
    inwards.

    Raises:
        ValueError: for settings outside their ranges.
    """

    kind = "headroom"

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
        enabled: bool = True,
    ) -> None:
        self.settings = HeadroomSettings(
            headroom=headroom,
            half_life=half_life,
            backoff_factor=backoff_factor,
            ceiling_interval=ceiling_interval,
            min_scale=min_scale,
            max_scale=max_scale,
        )
        state = HeadroomState(init_scale)
        super().__init__(
            state, max_consecutive_skips=max_consecutive_skips, min_scale=self.settings.floor, enabled=enabled
        )
        self._warn_if_inexact(init_scale=state.scale)

    def adjust(self, report: StepReport) -> HeadroomState:
        return adjust_headroom(self.state, self.settings, report)

    def _take_over_torch(self, state_dict: Mapping[str, Any]) -> None:
        self.state = HeadroomState(power_of_two_below(state_dict["scale"]), self.state.steps, self.state.skipped_steps)


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


__all__ = [
    "FP16_MAX",
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
