"""Autocast for custom autograd functions: equivalents of ``torch.amp.custom_fwd`` and ``custom_bwd``."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch

from hf_mp.casting.mode import active_autocast


def custom_fwd(
    forward: Callable[..., Any] | None = None,
    *,
    device_type: str | None = None,
    cast_inputs: torch.dtype | None = None,
) -> Callable[..., Any]:
    """Decorate the ``forward`` of a ``torch.autograd.Function``; decorate its ``backward`` with :func:`custom_bwd`.

    The equivalent of ``torch.amp.custom_fwd`` (torch's AMP examples, "Functions that need a particular dtype")::

        class Scaled(torch.autograd.Function):
            @staticmethod
            @hf_mp.custom_fwd(cast_inputs=torch.float32)
            def forward(ctx, x): ...

            @staticmethod
            @hf_mp.custom_bwd
            def backward(ctx, gradient): ...

    Args:
        forward: the static method, for use as ``@custom_fwd`` without arguments.
        device_type: has no effect; default None.
        cast_inputs: None (default) runs ``forward`` in the active autocast. A dtype casts floating inputs other than
            FP64 to it, also in containers and generators, and runs ``forward`` with autocast off. It has no effect
            without an active autocast.

    Raises:
        TypeError: if ``cast_inputs`` is not a dtype.
    """
    if cast_inputs is not None and not isinstance(cast_inputs, torch.dtype):
        raise TypeError(f"cast_inputs must be a torch.dtype, not {cast_inputs!r}")
    if forward is None:
        return functools.partial(custom_fwd, device_type=device_type, cast_inputs=cast_inputs)

    @functools.wraps(forward)
    def decorated(ctx: Any, *args: Any, **kwargs: Any) -> Any:
        active = active_autocast()
        # On ctx, as in torch.amp: on CUDA, backward runs in a thread without an active autocast.
        ctx._hf_mp_autocast = active
        if active is None or not active.enabled or cast_inputs is None:
            return forward(ctx, *args, **kwargs)
        ctx._hf_mp_autocast = active.nested_autocast()
        with ctx._hf_mp_autocast:
            args, kwargs = active.cast_arguments(args, kwargs, cast_inputs)
            return forward(ctx, *args, **kwargs)

    return decorated


def custom_bwd(backward: Callable[..., Any] | None = None, *, device_type: str | None = None) -> Callable[..., Any]:
    """Decorate the ``backward`` of a ``torch.autograd.Function`` to run in the autocast of its forward.

    The equivalent of ``torch.amp.custom_bwd``, for use with :func:`custom_fwd`.

    Args:
        backward: the static method, for use as ``@custom_bwd`` without arguments.
        device_type: has no effect; default None.
    """
    if backward is None:
        return functools.partial(custom_bwd, device_type=device_type)

    @functools.wraps(backward)
    def decorated(ctx: Any, *gradients: Any) -> Any:
        with ctx._hf_mp_autocast or contextlib.nullcontext():
            return backward(ctx, *gradients)

    return decorated
