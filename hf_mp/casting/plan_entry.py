"""Interfaces of autocasts, forwards and backwards, and :class:`PlanEntry`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from hf_mp.casting.tables import CastRule, TableName


class Mode(Protocol):
    """:class:`hf_mp.autocast` as handlers, module rules and patches use it."""

    dtype: torch.dtype
    enabled: bool
    tables: TableName
    module: nn.Module | None  # the module with a dtype rule that it runs, if any
    sums_in_fp64: bool
    call_override: Callable[..., Any] | None

    def __enter__(self) -> Any: ...
    def __exit__(self, *exc_info: Any) -> None: ...
    def cast(self, value: Any, dtype: torch.dtype) -> Any: ...
    def cast_arguments(
        self, args: Any, kwargs: Mapping[str, Any], dtype: torch.dtype
    ) -> tuple[Any, dict[str, Any]]: ...
    def apply(self, entry: PlanEntry, func: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]) -> Any: ...
    def run_with_mode(self, function: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]) -> Any: ...
    def nested_autocast(self, module: nn.Module | None = None, dtype: torch.dtype | None = None) -> Mode: ...
    def has_rule_for(self, module: nn.Module | None) -> bool: ...
    def wrap_for_recompute(self, function: Callable[..., Any]) -> Callable[..., Any]: ...
    def shortcut(self, func: Callable[..., Any], tensors: Any) -> PlanEntry | None: ...


class Forward(Protocol):
    """Running forward of an attached model: :class:`hf_mp.step.forward.ForwardContext`."""

    runtime: Any  # StepRuntime
    autocast: Any  # AttachedAutocast
    weights: Any  # ForwardWeights; None in a functorch transform, and if parameter slots are unchanged
    graph_task: int  # autograd's id of the backward around it; -1 if none
    began_without_grad: bool  # and without an observer
    is_dispatched: bool  # dispatcher kernels cast its calls
    lowers_caches: bool  # caches receive 16-bit keys and values
    is_recomputing: bool  # in a backward; gradients of weights are not scaled then

    def for_recompute(self, args: tuple[Any, ...] | None) -> AbstractContextManager[Any]:
        """Return a context manager to recompute a part of the forward with ``args`` (None: unknown), in any thread."""


class CustomBackward(Protocol):
    """Running backward of a custom autograd function: :class:`hf_mp.step.custom_backward.CustomBackward`."""

    @property
    def forward(self) -> Forward | None:
        """The attached forward that created the node, or None."""

    def autocast_for(self, enabled: bool) -> Mode | None:
        """Return the autocast to enter for ``torch.autocast(enabled=...)``; None to enter torch's own."""


class PlanEntry(NamedTuple):
    """How an autocast makes calls of one torch function."""

    rule: CastRule
    name: str
    handler: Callable[..., Any]  # (mode, name, func, args, kwargs) -> result


Plan = dict[Callable[..., Any], PlanEntry]
