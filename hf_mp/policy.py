""":class:`PrecisionPolicy`: the dtypes of storage, compute and communication, as a value and as a string."""

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
SWITCHES = ("fp32_head", "exact_generation")  # bool fields


def did_you_mean(precision: object, names: Iterable[str]) -> str:
    """Return ``. Did you mean 'fp16'?`` with the nearest of ``names``; empty if none is near."""
    # "16-mixed" of Lightning, "mixed_float16" of Keras
    text = spell(spell(str(precision)).replace("mixed", "").strip("-"))
    near = difflib.get_close_matches(text, names, n=1)
    return f". Did you mean {near[0]!r}?" if near else ""


@dataclass(frozen=True)
class PrecisionPolicy:
    """The dtypes of a training run.

    As in Micikevicius et al. 2017 (arXiv 1710.03740, section 3.1), weights are updated in FP32 masters, and floating
    model outputs are FP32. ``compute`` is the dtype of matmuls and convolutions.

    Attributes:
        params: dtype of the model's parameters: the master weights in ``float32`` (default), the working copies in
            ``float16``/``bfloat16`` (lean layouts).
        compute: dtype of lower-precision ops, ``float16`` by default. ``float32`` switches mixed precision off.
        loss_scale: ``"headroom"`` (in the FP16 presets), ``"dynamic"`` (torch's algorithm), a positive number (static),
            or None (default, also in the BF16 and FP32 presets: their exponent range needs no scaling).
        reduce: dtype of scaled gradients in communication, ``float32`` or ``compute``. None (default) is ``float32``,
            and ``compute`` in the lean layouts. Gradients are summed in FP32.
        fp32_head: whether the output embedding runs in FP32, in training and in ``generate()``; default False.
        exact_generation: whether the log-probability of a token has the same bits in ``generate()`` as in the training
            forward. 16-bit matmuls and attention are accumulated in FP64 and rounded once, so that no bit depends on
            the rest of the batch. Positions after padding are counted as in ``generate()``. Slow, for a CPU; default
            False.

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
        names = {entry.dtype: entry.name for entry in compute_dtypes()}
        shown = {}  # fields as in messages
        for field in _DTYPE_FIELDS:
            dtype = self.reduce_dtype if field == "reduce" else getattr(self, field)
            if not isinstance(dtype, torch.dtype):
                raise TypeError(f"{field}={dtype!r} must be a torch.dtype; text is read by PrecisionPolicy.parse")
            if dtype not in names:
                raise ValueError(f"{field}={dtype} is not allowed: use {', '.join(names.values())}")
            shown[field] = f"{field}={names[dtype]}"
        if self.params not in (torch.float32, self.compute):
            raise ValueError(
                f"{shown['params']} with {shown['compute']} is not allowed: store parameters in fp32 (default "
                "layout) or in the compute dtype (lean layout)"
            )
        if self.reduce_dtype not in (torch.float32, self.compute):
            raise ValueError(
                f"{shown['reduce']} with {shown['compute']} is not allowed: gradients travel in fp32 or in the compute "
                "dtype"
            )

    @property
    def is_mixed(self) -> bool:
        return self.compute is not torch.float32

    @property
    def is_lean(self) -> bool:
        """Whether the model's parameters are the working copies."""
        return self.params is not torch.float32

    @property
    def reduce_dtype(self) -> torch.dtype:
        """Dtype of gradients in communication."""
        return self.params if self.reduce is None else self.reduce

    wire = reduce_dtype  # the name until 0.1

    @classmethod
    def parse(cls, text: str | torch.dtype | PrecisionPolicy, **switches: bool) -> PrecisionPolicy:
        """Make a policy from a preset or from its fields.

        Args:
            text: one of :data:`PRESETS`, or fields as in ``"params=fp32,compute=fp16,loss_scale=dynamic"``. Other
                fields have the values of ``"fp16"``, or of a preset before them, as in ``"bf16,fp32_head=true"``.
                ``"FP16"``, ``"float16"`` and ``torch.float16`` are ``"fp16"``. A policy is returned unchanged.
            switches: :data:`SWITCHES` to turn on.

        Raises:
            TypeError: if ``text`` is no string, dtype or policy, and for an unknown switch.
            ValueError: for an unknown preset, field or dtype.
        """
        for name in switches:
            if name not in SWITCHES:
                advice = _advice_for(name, switches, cls.parse(text))
                raise TypeError(f"{name} is no option of mixed precision: {advice}")
        enabled = {name: value for name, value in switches.items() if value}
        if enabled:
            return replace(cls.parse(text), **enabled)  # type: ignore[arg-type]
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
        """Parse an optional preset and fields; a ValueError for an unknown or repeated field."""
        values: dict[str, Any] = {}
        names = [field.name for field in fields(cls)]
        parts = text.split(",")
        preset = PRESETS.get(spell(parts[0]))
        for part in parts[1:] if preset else parts:
            key, _, value = map(str.strip, part.partition("="))
            if key not in names or not value:
                raise ValueError(f"{part!r} in precision={text!r}: write field=value with one of {', '.join(names)}")
            if key in values:
                raise ValueError(f"{key} is given twice in precision={text!r}")
            values[key] = _read_field(key, value)
        compute: Any = values.get("compute", None if preset else cls.compute)  # None: the preset's loss scale stays
        if needs_loss_scale(compute):
            values.setdefault("loss_scale", compute_dtype(compute).loss_scale)
        return replace(preset or cls(), **values)

    def explain_change(self, saved: PrecisionPolicy) -> str:
        """Return one line about the resumption of a run saved under ``saved``."""
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
    if key == "loss_scale":
        return parse_loss_scale(value)
    if key in SWITCHES:
        if value.lower() not in ("true", "false"):
            raise ValueError(f"{key}={value!r} in a precision policy: write {key}=true or {key}=false")
        return value.lower() == "true"
    dtype = named_dtype(value)
    if isinstance(dtype, str):
        names = ", ".join(entry.name for entry in compute_dtypes())
        raise ValueError(f"{key}={value!r} is not a dtype of a precision policy: use one of {names}")
    return dtype


def _advice_for(name: str, given: Mapping[str, object], policy: PrecisionPolicy) -> str:
    """Return advice for ``name``, which is no option."""
    value = given[name]
    if isinstance(value, (str, torch.dtype)) and spell(value) in PRESETS:
        return f"the dtype is named by the precision, as in prepare(model, optimizer, precision={spell(value)!r})"
    if name in ("loss_scale", "loss_scaler_settings") and policy.loss_scale is None:
        return f"precision={str(policy)!r} has no loss scale, so leave it out"
    if name == "loss_scaler_settings":
        return "pass a scaler with these settings, as in loss_scaler=hf_mp.DynamicLossScaler(growth_interval=500)"
    if name == "loss_scale":
        return "name it in the precision, as in precision='fp16,loss_scale=dynamic'"
    return f"see help(hf_mp.MixedPrecision), whose switches are {' and '.join(SWITCHES)}"


def _layouts(*entries: ComputeDtype) -> dict[str, PrecisionPolicy]:
    """Return the default layouts, then the lean ones: the order of help texts and messages."""
    default = {entry.name: PrecisionPolicy(compute=entry.dtype, loss_scale=entry.loss_scale) for entry in entries}
    return default | {f"{name}-lean": replace(policy, params=policy.compute) for name, policy in default.items()}


PRESETS: dict[str, PrecisionPolicy] = {
    "fp32": PrecisionPolicy(compute=torch.float32),
    **_layouts(*LOWER_PRECISION_DTYPES.values()),
}
"""Policies by name. Add entries before :mod:`hf_mp.trainer` and :mod:`hf_mp.memory` are imported."""


def add_compute_dtype(entry: ComputeDtype) -> None:
    """Allow policies to compute in another dtype, with a preset of its name and a lean one.

    Call it before :mod:`hf_mp.trainer` and :mod:`hf_mp.memory` are imported.
    """
    LOWER_PRECISION_DTYPES[entry.dtype] = entry
    PRESETS.update(_layouts(entry))


def mixed_presets() -> tuple[str, ...]:
    return tuple(name for name, preset in PRESETS.items() if preset.is_mixed)
