"""Which dtype is stored, computed in and updated: the :class:`PrecisionPolicy`, as a value and as a string."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from hf_mp.dtypes import (
    LOWER_PRECISION_DTYPES,
    ComputeDtype,
    compute_dtype,
    compute_dtypes,
    named_dtype,
    needs_loss_scale,
    spell,
)
from hf_mp.scaling.rules import parse_loss_scale

_DTYPE_FIELDS = ("params", "compute", "reduce")
SWITCHES = ("fp32_head", "exact_generation")  # fields that are on or off


def did_you_mean(precision: object, names: Iterable[str]) -> str:
    """The nearest of ``names`` as a question, ``. Did you mean 'fp16'?``; empty where none is near."""
    # Lightning and Keras: "16-mixed", "mixed_float16".
    text = spell(spell(str(precision)).replace("mixed", "").strip("-"))
    near = difflib.get_close_matches(text, names, n=1)
    return f". Did you mean {near[0]!r}?" if near else ""


@dataclass(frozen=True)
class PrecisionPolicy:
    """The dtypes of a training run.

    After Micikevicius et al. 2017 (arXiv 1710.03740, section 3.1): weights are updated in FP32 masters, and floating
    outputs leave the model in FP32. ``compute`` is the dtype of matmuls and convolutions.

    Attributes:
        params: dtype in which the model's own parameters are stored. ``float32`` (the default) makes them the master
            weights; ``float16``/``bfloat16`` (lean layouts) makes them the working copies.
        compute: dtype of autocast's lower-precision ops, ``float16`` by default. ``float32`` switches mixed precision
            off.
        loss_scale: ``"headroom"`` (in the FP16 presets), ``"dynamic"`` (torch's algorithm), a positive number (static),
            or None (the default here, and in the BF16 and FP32 presets, whose exponent range needs no scaling).
        reduce: dtype in which scaled gradients travel between processes: ``float32`` or ``compute``. None (default)
            means ``float32``, and ``compute`` in the lean layouts. The receiving process sums them in FP32.
        fp32_head: whether the output embedding runs in FP32, in training and in ``generate()``; default False.
        exact_generation: whether a token's log-probability has the same bits in ``generate()`` as in the training
            forward. 16-bit matmuls and attention are summed in FP64 and rounded once, so that no bit depends on the
            order of summation, and with it on the rest of the batch; positions behind padding are counted as in
            ``generate()``. Slow, for a CPU; default False.

    Raises:
        TypeError: if a dtype is not a ``torch.dtype``, or a switch not a bool.
        ValueError: for a combination of dtypes that cannot train; the message names the field to change.
    """

    params: torch.dtype = torch.float32
    compute: torch.dtype = torch.float16
    loss_scale: str | float | None = None
    reduce: torch.dtype | None = None
    fp32_head: bool = False
    exact_generation: bool = False

    def __post_init__(self) -> None:
        self._check_dtypes()
        for name in SWITCHES:
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name}={getattr(self, name)!r} must be True or False")
        if self.exact_generation and not self.is_mixed:
            raise ValueError(
                "exact_generation=True with compute=fp32 is not allowed: nothing is attached in FP32 that could sum in "
                "FP64; use fp16 or bf16"
            )
        object.__setattr__(self, "loss_scale", parse_loss_scale(self.loss_scale))

    def _check_dtypes(self) -> None:
        """Raise a TypeError or ValueError for dtypes that cannot be combined."""
        names, said = {entry.dtype: entry.name for entry in compute_dtypes()}, {}  # as messages spell the fields
        for field in _DTYPE_FIELDS:
            dtype = self.wire if field == "reduce" else getattr(self, field)
            if not isinstance(dtype, torch.dtype):
                raise TypeError(f"{field}={dtype!r} must be a torch.dtype; text is read by PrecisionPolicy.parse")
            if dtype not in names:
                raise ValueError(f"{field}={dtype} is not allowed: use {', '.join(names.values())}")
            said[field] = f"{field}={names[dtype]}"
        if self.params not in (torch.float32, self.compute):
            raise ValueError(
                f"{said['params']} with {said['compute']} is not allowed: store parameters in fp32 (default layout) or "
                "in the compute dtype (lean layout)"
            )
        if self.wire not in (torch.float32, self.compute):
            raise ValueError(
                f"{said['reduce']} with {said['compute']} is not allowed: gradients travel in fp32 or in the compute "
                "dtype"
            )

    @property
    def is_mixed(self) -> bool:
        """Whether anything runs in another dtype than FP32."""
        return self.compute is not torch.float32

    @property
    def is_lean(self) -> bool:
        """Whether the model's parameters are the working copies (masters live with the optimizer)."""
        return self.params is not torch.float32

    @property
    def wire(self) -> torch.dtype:
        """The dtype in which gradients travel between processes."""
        return self.params if self.reduce is None else self.reduce

    @classmethod
    def parse(cls, text: str | torch.dtype | PrecisionPolicy, **switches: bool) -> PrecisionPolicy:
        """Make a policy from a preset or from a policy that is spelled out.

        Args:
            text: one of :data:`PRESETS`, or fields as in ``"params=fp32,compute=fp16,loss_scale=dynamic"``, where
                those that are not named have the values of ``"fp16"``, or of a preset that comes first, as in
                ``"bf16,fp32_head=true"``. ``"FP16"``, ``"float16"`` and ``torch.float16`` are ``"fp16"``. A policy is
                returned as it is.
            switches: further ones of :data:`SWITCHES` to turn on.

        Raises:
            TypeError: for anything but text, a dtype and a policy, and for an unknown switch.
            ValueError: for an unknown preset, field or dtype.
        """
        if unknown := [name for name in switches if name not in SWITCHES]:
            raise TypeError(
                f"{unknown[0]} is no option of mixed precision: {_option_for(unknown[0], switches, cls.parse(text))}"
            )
        if on := {name: value for name, value in switches.items() if value}:
            return replace(cls.parse(text), **on)  # type: ignore[arg-type]
        if isinstance(text, cls):
            return text
        if not isinstance(text, (str, torch.dtype)):
            raise TypeError(
                f"precision must be a string, a dtype or a PrecisionPolicy, not {type(text).__name__}: use one of "
                f"{', '.join(PRESETS)}{did_you_mean(text, PRESETS)}"
            )
        if spell(text) not in PRESETS and "=" not in str(text):
            raise ValueError(
                f"precision={text!r} is not known: use one of {', '.join(PRESETS)}, "
                f"or spell it out as 'params=fp32,compute=fp16,loss_scale=headroom'{did_you_mean(text, PRESETS)}"
            )
        return cls._parse_fields(str(text))

    @classmethod
    def _parse_fields(cls, text: str) -> PrecisionPolicy:
        """The policy of ``text``: a preset or not, then fields; a ValueError for an unknown or repeated field."""
        values: dict[str, Any] = {}
        names = [field.name for field in fields(cls)]
        first, *others = text.split(",")
        base = PRESETS.get(spell(first))
        for part in others if base else (first, *others):
            key, _, value = map(str.strip, part.partition("="))
            if key not in names or not value:
                raise ValueError(f"{part!r} in precision={text!r}: write field=value with one of {', '.join(names)}")
            if key in values:
                raise ValueError(f"{key} is given twice in precision={text!r}")
            values[key] = _read_field(key, value)
        compute: Any = values.get("compute", None if base else cls.compute)
        if needs_loss_scale(compute):
            values.setdefault("loss_scale", compute_dtype(compute).loss_scale)
        return replace(base or cls(), **values)

    def explain_change(self, saved: PrecisionPolicy) -> str:
        """Say in one line what changes if a run saved under ``saved`` goes on under this policy."""
        effect = "the FP32 weights and the optimizer's state go on as they were saved"
        if self.loss_scale != saved.loss_scale:
            was, now = saved.loss_scale or "none", self.loss_scale or "none"
            effect += f"; the loss scale starts anew: loss_scale was {was} in the saved run, and is {now} here"
        return f"saved in precision {saved}, resumed in {self}: {effect}"

    def __str__(self) -> str:
        switches = [f"{name}=true" for name in SWITCHES if getattr(self, name)]
        plain = replace(self, **dict.fromkeys(SWITCHES, False))  # type: ignore[arg-type]
        for name, preset in PRESETS.items():
            if preset == plain:
                return ",".join([name, *switches])
        named = {name: getattr(self, name) for name in _DTYPE_FIELDS}
        dtypes = [f"{name}={compute_dtype(dtype).name}" for name, dtype in named.items() if dtype is not None]
        return ",".join([*dtypes, f"loss_scale={self.loss_scale or 'none'}", *switches])


def _read_field(key: str, value: str) -> object:
    """The value of the field ``key``; a ValueError for text that is none."""
    if key == "loss_scale":
        return parse_loss_scale(value)
    if key in SWITCHES:
        if value.lower() not in ("true", "false"):
            raise ValueError(f"{key}={value!r} in a precision policy: write {key}=true or {key}=false")
        return value.lower() == "true"
    if isinstance(dtype := named_dtype(value), str):
        names = ", ".join(entry.name for entry in compute_dtypes())
        raise ValueError(f"{key}={value!r} is not a dtype of a precision policy: use one of {names}")
    return dtype


def _option_for(name: str, given: Mapping[str, object], policy: PrecisionPolicy) -> str:
    """Say which argument to use in place of ``name``, which is not one."""
    if isinstance(value := given[name], (str, torch.dtype)) and (preset := spell(value)) in PRESETS:
        return f"the dtype is named by the precision, as in prepare(model, optimizer, precision={preset!r})"
    if name in ("loss_scale", "loss_scaler_settings") and policy.loss_scale is None:
        return f"precision={str(policy)!r} has no loss scale, so leave it out"
    if name == "loss_scaler_settings":
        return "pass a scaler with these settings, as in loss_scaler=hf_mp.DynamicLossScaler(growth_interval=500)"
    if name == "loss_scale":
        return "name it in the precision, as in precision='fp16,loss_scale=dynamic'"
    return f"see help(hf_mp.MixedPrecision), whose switches are {' and '.join(SWITCHES)}"


def _layouts(*entries: ComputeDtype) -> dict[str, PrecisionPolicy]:
    """All default layouts, then all lean ones: help texts and messages list them in this order."""
    default = {entry.name: PrecisionPolicy(compute=entry.dtype, loss_scale=entry.loss_scale) for entry in entries}
    return default | {f"{name}-lean": replace(policy, params=policy.compute) for name, policy in default.items()}


PRESETS: dict[str, PrecisionPolicy] = {
    "fp32": PrecisionPolicy(compute=torch.float32),
    **_layouts(*LOWER_PRECISION_DTYPES.values()),
}
"""The policies by name. A new one is one entry, before :mod:`hf_mp.trainer` and :mod:`hf_mp.memory` are imported."""


def add_compute_dtype(entry: ComputeDtype) -> None:
    """Let policies compute in another dtype, by a preset of its name and a lean one.

    A program calls it before :mod:`hf_mp.trainer` and :mod:`hf_mp.memory` are imported.
    """
    LOWER_PRECISION_DTYPES[entry.dtype] = entry
    PRESETS.update(_layouts(entry))


def mixed_presets() -> tuple[str, ...]:
    """The names of the presets in which anything runs in another dtype than FP32."""
    return tuple(name for name, preset in PRESETS.items() if preset.is_mixed)
