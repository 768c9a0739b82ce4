"""The loss scalers: what keeps the state of a loss scale, around the rules that adjust it.

The rules are in :mod:`hf_mp.scaling.rules`, the methods of ``torch.amp.GradScaler`` in :mod:`hf_mp.scaling.explicit`.
"""

from __future__ import annotations

import contextlib
import copy
import math
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields, replace
from typing import Any, Generic, NamedTuple, Self

import torch
from torch import Tensor

from hf_mp.policy import PrecisionPolicy, parse_loss_scale, spell
from hf_mp.scaling.explicit import ExplicitScaling
from hf_mp.scaling.rules import (
    DYNAMIC,
    HEADROOM,
    LEAST_USEFUL_SCALE,
    RULES,
    STATIC,
    DynamicSettings,
    DynamicState,
    HeadroomSettings,
    HeadroomState,
    ScalerState,
    ScaleRule,
    State,
    StaticSettings,
    StepReport,
    check_scale,
    check_whole,
    power_of_two_below,
    scale_text,
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

    Args:
        rule: how the scale is set; an entry of :data:`hf_mp.scaling.rules.RULES`, or any other.
        settings: of the rule.
        max_consecutive_skips: skipped steps in a row at the smallest scale after which :class:`LossScaleError` is
            raised; default 50.
        enabled: False makes every method pass through; default True.
    """

    def __init__(
        self, rule: ScaleRule[State], settings: Any, *, max_consecutive_skips: int = 50, enabled: bool = True
    ) -> None:
        check_whole(1, max_consecutive_skips=max_consecutive_skips)
        self.rule, self.kind = rule, rule.name
        self.settings = settings
        self._state = rule.start(settings).checked()
        self._max_consecutive_skips = max_consecutive_skips
        given: object = enabled
        if isinstance(given, (Tensor, str)):
            raise TypeError(f"enabled must be True or False, not {enabled!r:.100}")
        self._enabled = bool(enabled)
        self._was_asked_to_scale = False
        self._tensors: dict[torch.device, ScaleTensors] = {}
        self._begin_iteration()
        self._warn_if_inexact(**{name: getattr(settings, name) for name in settings.EXACT})

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

    def get_scale(self) -> float:
        """The loss scale in force; 1.0 for a disabled scaler."""
        return self.state.scale if self._enabled else 1.0

    @property
    def smallest_scale(self) -> float:
        """The smallest scale that overflows can lower this one to."""
        return self.settings.floor

    def scale_tensors(self, device: torch.device) -> ScaleTensors:
        """The scale and its inverse on ``device``, which follow the scale from now on."""
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
        """Take in what an optimizer step saw and set the next scale; ``nonfinite`` names gradients for the error alone.

        Raises:
            LossScaleError: after ``max_consecutive_skips`` skipped steps in a row at the smallest scale.
        """
        if not self._enabled:
            return
        gives_up = report.overflow and self._skips_once_too_often()
        self.state = self.rule.adjust(self.state, self.settings, report)
        if gives_up:
            skips, scale = self.state.consecutive_skips, self.state.scale
            where = f" even at loss scale {scale_text(scale)}, the smallest allowed"
            if scale == 1.0 and self.kind == STATIC.name:
                where = " without loss scaling"
            raise LossScaleError(
                f"{skips} optimizer steps in a row were skipped (since step {self.state.steps - skips + 1}): gradients "
                f"are inf or NaN{where}{_listed(nonfinite())}. The model or its data makes them, not the scale: look "
                "for NaN in the inputs, lower the learning rate, or train in a precision of wider range"
            )

    def back_off(self, scale: float | None = None) -> bool:
        """Take the scale that an overflow leads to, for a step that runs again: none is counted; False if it stays.

        With ``scale``, take that one, if this scaler goes as low. The rule learns from the step as from one that
        follows an overflow.
        """
        before = self.state
        after = self.rule.adjust(before, self.settings, StepReport(overflow=True))
        is_lower = self._enabled and after.scale < before.scale
        if scale is not None and is_lower:
            after = replace(after, scale=max(scale, min(self.smallest_scale, before.scale)))
        skips = max(before.consecutive_skips, int(is_lower))
        counts = {"steps": before.steps, "skipped_steps": before.skipped_steps, "consecutive_skips": skips}
        self.state = replace(after, **counts)
        return is_lower

    def _skips_once_too_often(self) -> bool:
        skips = self.state.consecutive_skips + 1
        return skips >= self._max_consecutive_skips and self.state.scale <= self.smallest_scale

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
            way_out = "resume without it, or disable this one"
            raise RuntimeError(f"the state is empty, as that of a disabled scaler is: {way_out}")
        if set(state_dict) == set(_TORCH_KEYS):
            check_scale(state_dict["scale"])
            self._take_over_torch(state_dict)
        else:
            self._check_keys(state_dict)
            self._take_over(state_dict)
        self._warn_if_inexact(scale=self.state.scale)

    def _take_over_torch(self, state_dict: Mapping[str, Any]) -> None:
        counts = {"steps": self.state.steps, "skipped_steps": self.state.skipped_steps}
        self.state = replace(self.rule.start(self.settings), scale=state_dict["scale"], **counts).checked()

    def _take_over(self, state_dict: Mapping[str, Any]) -> None:
        self.state = type(self.state)(**{name: state_dict[name] for name in self._state_keys()}).checked()

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
        self.state = replace(self.state, scale=new_scale).checked()
        self._warn_if_inexact(new_scale=self.state.scale)

    def _warn_if_inexact(self, **values: float | None) -> None:
        """Warn, at the user's line, about a scale or factor that makes scaling round gradients."""
        for name, value in values.items():
            if not self._enabled or value is None or math.isinf(value):
                continue
            if name == "backoff_factor" and value <= 0.0:
                _warn(f"{name}={value}: the first overflow takes the loss scale down to min_scale")
            elif value and math.frexp(value)[0] != 0.5:
                _warn(f"{name}={value} is no power of two: scaling and unscaling then round gradients")

    def __getstate__(self) -> dict[str, Any]:
        if self._reports:
            raise RuntimeError("a loss scaler is pickled between update() and the next unscale_() or step() only")
        return {**self.__dict__, "_tensors": {}}


def _listed(names: Sequence[str], limit: int = 5) -> str:
    if not names:
        return ""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return f" (not finite: {', '.join(names[:limit])}{more})"


def _check_device(device: Any) -> None:
    with contextlib.suppress(RuntimeError):  # of a name that is none
        if device is None or isinstance(device, torch.device) or (isinstance(device, str) and torch.device(device)):
            return
    raise TypeError(f"device={device!r} is no device: write init_scale={device!r}, if that is the scale")


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

    def __init__(self, scale: float, *, max_consecutive_skips: int = 50, enabled: bool = True) -> None:
        super().__init__(STATIC, StaticSettings(scale), max_consecutive_skips=max_consecutive_skips, enabled=enabled)

    @property
    def is_scaling(self) -> bool:
        return self._enabled and self.state.scale != 1.0

    def _take_over_torch(self, state_dict: Mapping[str, Any]) -> None:
        kept, saved = self.state.scale, state_dict["scale"]
        _warn(f"a constant loss scale of {scale_text(kept)} stays: the saved one of {scale_text(saved)} is dropped")


class DynamicLossScaler(LossScaler[DynamicState]):
    """torch's dynamic loss scale: halved on an overflow, doubled after ``growth_interval`` clean steps.

    Algorithm of ``torch.amp.GradScaler`` (its documentation; Micikevicius et al. 2017, section 3.2)::

        overflow:  scale *= backoff_factor; tracker = 0
        clean:     tracker += 1
                   if tracker == growth_interval: scale *= growth_factor; tracker = 0

    Args:
        device: for the signature of ``torch.amp.GradScaler``: the scale follows each loss to its device. Default None.
        init_scale: scale of the first step; default 2**16.
        growth_factor: at least 1, with which the scale never grows; default 2.
        backoff_factor: below 1; default 0.5.
        growth_interval: clean steps before the scale grows; default 2000.
        hysteresis: overflows that it takes to lower the scale; default 1 lowers it at once. Every further one lowers
            it too, until the scale grows: that restores the count, as in Megatron-LM (``--hysteresis``) and DeepSpeed.
        consecutive_hysteresis: a clean step restores the count as well, so that only overflows in a row lower the
            scale, as DeepSpeed's setting of that name and NeMo's scaler do; default False.
        growth_delay: clean steps that do not count towards growth, at the beginning and after each overflow; default
            0. DeepSpeed leaves 1 out.
        min_scale: the scale is not lowered below this; default 2**-48, where FP16's largest number is a gradient of
            2**64, which no step is taken with. With 0 only FP32 ends the fall, at 2**-126.
        max_scale: the scale does not grow above this; default None, no bound but FP32's.
        max_consecutive_skips: skipped steps in a row at ``min_scale`` after which :class:`LossScaleError` is raised;
            default 50.
        enabled: False makes every method pass through, as with torch's.

    A factor or scale that is no power of two is allowed, as in torch, with a warning: scaling then rounds. A negative
    ``backoff_factor`` ends at ``min_scale``, where torch's scale turns negative.

    Raises:
        ValueError: for settings outside these ranges.
        TypeError: for a ``device`` that is none.
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
        _check_device(device)
        settings = DynamicSettings(
            init_scale, growth_factor, backoff_factor, growth_interval, hysteresis, consecutive_hysteresis,
            growth_delay, min_scale, max_scale,
        )  # fmt: skip
        super().__init__(DYNAMIC, settings, max_consecutive_skips=max_consecutive_skips, enabled=enabled)

    def state_dict(self) -> dict[str, Any]:
        """The five entries of ``torch.amp.GradScaler.state_dict()``, which torch's scaler loads, and ours besides."""
        if not self._enabled:
            return {}
        values = super().state_dict()
        tracker = values.pop("growth_tracker")
        settings = {name: getattr(self.settings, name) for name in _TORCH_SETTINGS}
        return {**values, **settings, "_growth_tracker": tracker}

    def _take_over_torch(self, state_dict: Mapping[str, Any]) -> None:
        fresh = {"consecutive_skips": 0, "hysteresis_left": self.settings.hysteresis}
        self._take_over({**asdict(self.state), **fresh, **state_dict})

    def _take_over(self, state_dict: Mapping[str, Any]) -> None:
        settings = replace(self.settings, **{name: state_dict[name] for name in _TORCH_SETTINGS})
        values = {name: state_dict[name] for name in super()._state_keys() - {"growth_tracker"}}
        self.state = DynamicState(**values, growth_tracker=state_dict["_growth_tracker"]).checked()
        self._set_settings(settings)

    def _state_keys(self) -> set[str]:
        return super()._state_keys() - {"growth_tracker"} | set(_TORCH_KEYS)

    def _set_settings(self, settings: DynamicSettings) -> None:
        self.settings = settings
        self._warn_if_inexact(growth_factor=settings.growth_factor, backoff_factor=settings.backoff_factor)

    def get_growth_factor(self) -> float:
        """The factor by which the scale grows."""
        return self.settings.growth_factor

    def set_growth_factor(self, new_factor: float) -> None:
        """Set the factor by which the scale grows; at least 1."""
        self._set_settings(replace(self.settings, growth_factor=new_factor))

    def get_backoff_factor(self) -> float:
        """The factor by which an overflow lowers the scale."""
        return self.settings.backoff_factor

    def set_backoff_factor(self, new_factor: float) -> None:
        """Set the factor by which an overflow lowers the scale; below 1."""
        self._set_settings(replace(self.settings, backoff_factor=new_factor))

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

    The pass that looks for inf and NaN gives the largest gradient magnitude too, so the scale can be computed, such
    that their product stays below 65504 (Micikevicius et al. 2017, section 3.2; NVIDIA's "Train With Mixed Precision"
    guide). Here that choice is made at every step, and how much headroom gradients need is learned from them::

        clean step with largest unscaled gradient g:
            if it is the first: level = g; headroom = what keeps the scale at 2**16 or below, at least 5; done
            rise = log2(g / level)                      # doublings above what is usual
            if an overflow came before it:
                if rise > headroom:                     # a jump: g is the new level
                    level = g; done
                elif fewer than 16 clean steps lie between it and the last overflow: headroom += 1.25
                elif futile or headroom >= max(12, that of 2**6): futile = True  # no scale prevents it
                else: headroom += 1.25
            futile = False after 16 * patience steps without an overflow
            sinking = 1 / (1 + 8 * skipped steps so far)
            if futile or no step was skipped: sinking = max(sinking, 2 * (headroom - 4))
            headroom -= sinking / patience
            headroom = max(headroom, rise + 0.5, 1)
            level moves towards g, half the way (of their logarithms) in half_life steps
        scale = largest power of two with scale * level * 2**headroom <= 65504
        overflow:
            scale *= backoff_factor, from above 1 no further than to 1

    A scale that is far too low after an overflow is low for one step. If the gradient that follows is larger, that
    was the reason; a usual one tells of a spike, of a gradient of activations that is larger than any of weights, or of
    data that no scale can help. The more steps were skipped, the longer headroom is kept.

    Args:
        init_scale: scale of the first step, which is low, as nothing was measured yet; default 2**10.
        headroom: doublings between the level and FP16's largest number, to begin with, at least; default 5.
            It sinks to 1 while gradients need no more.
        half_life: steps in which the level goes half the way to another one; default 25.
        backoff_factor: factor on an overflow; default 2**-20.
        patience: steps in which the last doublings of headroom sink by one as long as no step was skipped; default 250.
        min_scale: the scale is not lowered below this; default 2**-48, where FP16's largest number is a gradient of
            2**64, which no step is taken with; 0 is no bound but FP32's.
        max_scale: the scale does not grow above this; default 2**40, None for no bound but FP32's.
        max_consecutive_skips: skipped steps in a row at ``min_scale`` after which :class:`LossScaleError` is raised;
            default 50.
        enabled: False makes every method pass through; default True.

    The scale is a power of two from its first update on, whatever the settings are: bounds that are none are taken
    inwards.

    Raises:
        ValueError: for settings outside their ranges.
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
        max_consecutive_skips: int = 50,
        enabled: bool = True,
    ) -> None:
        settings = HeadroomSettings(init_scale, headroom, half_life, backoff_factor, patience, min_scale, max_scale)
        super().__init__(HEADROOM, settings, max_consecutive_skips=max_consecutive_skips, enabled=enabled)

    def _take_over_torch(self, state_dict: Mapping[str, Any]) -> None:
        super()._take_over_torch({**state_dict, "scale": power_of_two_below(state_dict["scale"])})


_SCALERS: dict[str, type[LossScaler[Any]]] = {HEADROOM.name: HeadroomLossScaler, DYNAMIC.name: DynamicLossScaler}


def make_loss_scaler(loss_scale: str | float | None, **settings: Any) -> LossScaler[Any]:
    """The scaler that a policy's ``loss_scale`` names: a rule of ``RULES``, a number, or None (1: the guard remains).

    ``settings`` are those of the rule, ``max_consecutive_skips`` and ``enabled``; a ValueError for others.
    """
    kind = parse_loss_scale(loss_scale)
    rule = RULES[kind] if isinstance(kind, str) else STATIC
    own = {field.name for field in fields(rule.settings)} if rule is not STATIC else set()
    allowed = sorted(own | {"max_consecutive_skips", "enabled"})
    if unknown := sorted(settings.keys() - set(allowed)):
        names = ", ".join(unknown)
        raise ValueError(f"the {rule.name!r} loss scaler has no setting {names}: it has {', '.join(allowed)}")
    if rule is STATIC:
        return StaticLossScaler(1.0 if kind is None else float(kind), **settings)
    if rule.name in _SCALERS:
        return _SCALERS[rule.name](**settings)
    ours = {name: settings.pop(name) for name in own & settings.keys()}
    return LossScaler(rule, rule.settings(**ours), **settings)


STATE_VERSION = 1


def state_of(policy: PrecisionPolicy, scaler: LossScaler[Any]) -> dict[str, Any]:
    """What a checkpoint of a run under ``policy`` needs besides model and optimizer, as plain values for JSON."""
    return {"version": STATE_VERSION, "precision": str(policy), "loss_scaler": scaler.state_dict()}


def settings_of(runtime: Any) -> dict[str, Any]:
    """The settings that must match on all ranks that train one model, the most important first."""
    scaler: LossScaler[Any] = runtime.scaler
    found: dict[str, Any] = {"precision": str(runtime.policy), "is_scaled": scaler.is_enabled()}
    if scaler.is_enabled():
        state = {"loss_scaler": scaler.kind, **scaler.state_dict()}
        state.pop("kind", None)
        # What is in force wins over what a scaler began with.
        found |= state | vars(scaler.settings) | state
        found["max_consecutive_skips"] = scaler._max_consecutive_skips
    rules = {_name_of(key): spell(rule) for key, rule in runtime.rules.items()}
    return {**found, "rules": dict(sorted(rules.items()))}


def _name_of(ruled: Any) -> str:
    return ruled if isinstance(ruled, str) else f"{getattr(ruled, '__module__', '')}.{ruled.__name__}"


def load_state(state: Mapping[str, Any], policy: PrecisionPolicy, scaler: LossScaler[Any]) -> None:
    """Have ``scaler`` take over what :func:`state_of` gave; one of another loss scaling is left, with a warning."""
    if not isinstance(state, Mapping):
        raise TypeError(f"a mixed precision state is a mapping, not a {type(state).__name__}")
    if state.get("version") != STATE_VERSION or "loss_scaler" not in state:
        found, keys = state.get("version"), sorted(state, key=str)
        raise ValueError(f"not a mixed precision state of version {STATE_VERSION}: version={found!r}, keys {keys}")
    saved = PrecisionPolicy.parse(str(state.get("precision", policy)))
    if saved.loss_scale == policy.loss_scale:
        scaler.load_state_dict(state["loss_scaler"])
        return
    was, now = saved.loss_scale or "none", policy.loss_scale or "none"
    warnings.warn(f"loss_scale was {was} in the saved run, and is {now} here: the loss scale starts anew", stacklevel=3)
