"""``SessionSettings``: what one Trainer does, put together from its arguments and from what an adapter was given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from transformers import TrainingArguments

from hf_mp.casting.rules import Rules
from hf_mp.casting.tables import TableName
from hf_mp.diagnostics.healing import MAX_FP32_SHARE, check_healing
from hf_mp.diagnostics.precision_recorder import check_interval
from hf_mp.policy import SWITCHES, PrecisionPolicy, parse_loss_scale
from hf_mp.scaling.scalers import LossScaler, make_loss_scaler
from hf_mp.step.mixed_precision import MixedPrecision

SAVE_DTYPES = {"fp32": torch.float32, "original": None, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class SessionSettings:
    """What a session does; :class:`hf_mp.MixedPrecisionArguments` and the adapters say what each entry means.

    Raises:
        ValueError: for a number of steps that is none.
        TypeError: for one string as patterns.
    """

    policy: PrecisionPolicy
    tables: TableName = "compact"
    rules: Rules | None = None
    loss_scaler_settings: Mapping[str, Any] = field(default_factory=dict)
    free_gradients: str = "step"
    on_overflow: str = "skip"
    max_fp32_share: float = MAX_FP32_SHARE
    explain_overflows: bool = True
    keep_overflow_batches: bool = False
    check_gradients: bool = True
    histogram_steps: int = 0
    histogram_layers: Sequence[str] | None = None
    precision_report: bool = False
    precision_contract: bool = True
    save_dtype: str = "fp32"
    log_probability_gap_steps: int = 0
    save_failure: str = "continue"
    save_in_background: bool = False
    handle_preemption: bool = True

    @classmethod
    def of(
        cls,
        args: TrainingArguments | None,
        precision: str | torch.dtype | PrecisionPolicy | None,
        given: Mapping[str, Any],
    ) -> SessionSettings:
        """What is ``given`` and not None, else what ``args`` say (``MixedPrecisionArguments``), else the default."""
        said = {entry.name: getattr(args, entry.name) for entry in fields(cls) if hasattr(args, entry.name)}
        own: PrecisionPolicy | None = getattr(args, "precision_policy", None)
        policy = own if precision is None and own is not None else PrecisionPolicy.parse(precision or "fp16")
        switches: dict[str, Any] = {name: True for name in SWITCHES if getattr(args, name, False)}
        switches |= {name: given[name] for name in SWITCHES if given.get(name) is not None}
        policy = replace(policy, **switches)
        given = {name: value for name, value in given.items() if name not in SWITCHES}
        if precision is not None and (loss_scale := getattr(args, "loss_scale", None)) is not None:
            policy = replace(policy, loss_scale=parse_loss_scale(loss_scale))
        return cls(**{**without_none(said), "policy": policy, **without_none(given)})

    def __post_init__(self) -> None:
        if self.save_dtype not in SAVE_DTYPES:
            raise ValueError(f"save_dtype={self.save_dtype!r}: choose one of {', '.join(SAVE_DTYPES)}")
        check_interval("histogram_steps", self.histogram_steps)
        check_interval("log_probability_gap_steps", self.log_probability_gap_steps)
        check_healing(self.on_overflow, self.policy, self.max_fp32_share, in_backward=self.free_gradients == "backward")
        if isinstance(self.histogram_layers, str):
            raise TypeError(f"histogram_layers={self.histogram_layers!r} is one string: write a list of patterns")

    @property
    def records(self) -> bool:
        """Whether to record anything."""
        return bool(self.histogram_steps or self.precision_report)

    def make_scaler(self) -> LossScaler[Any]:
        """A loss scaler; raises ValueError for settings that it does not have."""
        return make_loss_scaler(self.policy.loss_scale, **self.loss_scaler_settings)

    def make_runtime(self, args: TrainingArguments) -> MixedPrecision:
        """A runtime for this policy; ``args`` say to what norm gradients are clipped inside backward."""
        in_backward: dict[str, Any] = {}
        if self.free_gradients == "backward":
            in_backward = {"free_gradients": "backward", "max_grad_norm": args.max_grad_norm or None}
        return MixedPrecision(
            self.policy, loss_scaler=self.make_scaler(), tables=self.tables, rules=self.rules, **in_backward
        )


def without_none(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Those that were given."""
    return {name: value for name, value in settings.items() if value is not None}
