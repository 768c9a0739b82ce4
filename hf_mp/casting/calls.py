"""Calls of torch functions under an autocast (:class:`Mode`): what is done with one (:class:`PlannedCall`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from hf_mp.casting.tables import CastRule, TableName


class Mode(Protocol):
    """:class:`hf_mp.autocast`, as those know it that make its calls or ask which one is active."""

    dtype: torch.dtype
    enabled: bool
    tables: TableName
    module: nn.Module | None  # of an island
    sums_in_fp64: bool
    observer: Callable[..., Any] | None

    def __enter__(self) -> Any: ...
    def __exit__(self, *exc_info: Any) -> None: ...
    def cast(self, value: Any, dtype: torch.dtype) -> Any: ...
    def cast_arguments(
        self, args: Any, kwargs: Mapping[str, Any], dtype: torch.dtype
    ) -> tuple[Any, dict[str, Any]]: ...
    def apply(self, entry: PlannedCall, func: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]) -> Any: ...
    def run_inside(self, function: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]) -> Any: ...
    def island(self, module: nn.Module | None = None, dtype: torch.dtype | None = None) -> Mode: ...
    def has_rule_for(self, module: nn.Module | None) -> bool: ...
    def recomputation(self, function: Callable[..., Any]) -> Callable[..., Any]: ...
    def shortcut(self, func: Callable[..., Any], tensors: Any) -> PlannedCall | None: ...


class Forward(Protocol):
    """Forward of an attached model that runs in this thread: :class:`hf_mp.step.forward.ForwardContext`."""

    runtime: Any  # the StepRuntime of the model
    autocast: Any  # the AttachedAutocast that casts its calls
    weights: Any  # its ForwardWeights; None in a transform of functorch, and where slots are left alone
    graph_task: int  # autograd's number of the backward around it; -1 without one
    began_without_grad: bool  # also: no observer makes its calls
    is_dispatched: bool  # whether kernels of the dispatcher cast its calls
    lowers_caches: bool  # whether Transformers' caches receive 16-bit keys and values
    is_recomputing: bool  # whether a backward recomputes a part of it: gradients of its weights are not scaled

    def for_recompute(self, args: tuple[Any, ...] | None) -> AbstractContextManager[Any]:
        """A context to recompute a part of it in, whose arguments are ``args`` (None: not known); in any thread."""


class CustomBackward(Protocol):
    """Backward of a custom autograd function that runs in this thread: of :mod:`hf_mp.step.custom_backward`."""

    @property
    def forward(self) -> Forward | None:
        """The forward that made its node; None if no attached forward did."""

    def autocast_for(self, enabled: bool) -> Mode | None:
        """The autocast to enter for a ``torch.autocast(enabled=...)`` in it; None if torch's own is to be entered."""


class PlannedCall(NamedTuple):
    """What an autocast does with the calls of one torch function."""

    rule: CastRule
    name: str
    handler: Callable[..., Any]  # (mode, name, func, args, kwargs) -> result


Plan = dict[Callable[..., Any], PlannedCall]
