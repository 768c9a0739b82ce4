"""``Region``: where the forwards of an attached model run, with their weights in the slots and in autocast."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from hf_mp.casting.dispatched import can_dispatch, compiled_frames, dispatched
from hf_mp.casting.kv_cache import lowers_attention
from hf_mp.weights.attached_autocast import AttachedAutocast
from hf_mp.weights.forward_weights import ForwardWeights
from hf_mp.weights.source import WeightSource


class Region:
    """Runs forwards of one model: fills the slots, and decides who makes its calls, kernels or a mode.

    Args:
        weights: the owner of the model's weights.
        model: whose forwards run; None before there is one.
        settings: of the :class:`AttachedAutocast`, in the dtype of the policy.
    """

    def __init__(self, weights: WeightSource, model: nn.Module | None, **settings: Any) -> None:
        self._weights, policy = weights, weights.layout.policy
        self._model = (lambda: None) if model is None else weakref.ref(model)
        self.autocast = AttachedAutocast(self.running, policy.compute, model=model, **settings)
        if policy.exact_generation:
            self.autocast.sum_in_fp64()
        self._meets_compiler = False
        self._threads: list[int] = []  # in which a forward of the model runs
        self._learn_anew()

    def _learn_anew(self) -> None:
        self._weights.learn_anew(self.autocast.lowers, self.autocast.ruled())

    def add_rules(self, rules: Mapping[str, str], model: nn.Module | None) -> None:
        """As :meth:`autocast.add_rules`; the weights learn anew what products use."""
        self.autocast.add_rules(rules, model)
        self._learn_anew()

    def refuse_other_threads(self) -> None:
        """Raise a RuntimeError if another thread runs a forward of the model, in whose modules its weights lie."""
        if set(self._threads) - {threading.get_ident()}:
            raise RuntimeError(
                "a forward with gradients began while another thread ran one of the same attached model, and a module "
                "can hold the 16-bit weights of only one: run them one after the other, or give the other thread a "
                "copy.deepcopy of the model"
            )

    @contextmanager
    def running(self, weights: ForwardWeights | None) -> Iterator[None]:
        """Context of one forward: autocast, with ``weights`` in their slots; None leaves the slots alone."""
        mode, ident = self.autocast, threading.get_ident()
        thread = mode.thread
        before = dict(vars(thread))
        is_reading = mode.observer is None and not torch.is_grad_enabled()
        thread.weights, thread.is_reading = weights, is_reading
        thread.lowers_caches = is_reading and self._lowers_attention()
        thread.is_dispatched = weights is not None and self._may_be_dispatched()
        # Kernels hold for this thread: one that runs another forward is not affected.
        kernels = dispatched(mode, is_reading=is_reading) if thread.is_dispatched else nullcontext()
        self._threads.append(ident)
        try:
            # Already filled where a backward inside of this forward recomputes a checkpoint, in whatever thread.
            filled = nullcontext() if weights is None or weights.are_filled else weights
            with filled:
                with self._weights.layout.saving_for_backward(), kernels, mode:
                    yield
                # Something was compiled for the first time, with casts of this region that other callers would get.
                if thread.is_dispatched and compiled_frames():
                    torch._dynamo.reset()
                    self._meets_compiler = True
        finally:
            self._threads.remove(ident)
            vars(thread).update(before)

    def _may_be_dispatched(self) -> bool:
        """Whether kernels may make the calls of a forward that are in tables."""
        # FSDP and tensor parallelism, which keep no copies, fill slots while the forward runs.
        is_plain = self._weights.layout.keeps_copies and not self.autocast.has_rules and not self._has_scripts
        if not is_plain or self.autocast.observer is not None:
            return False
        self._meets_compiler = self._meets_compiler or compiled_frames() > 0
        return not self._meets_compiler and self._has_kernels

    @functools.cached_property
    def _has_scripts(self) -> bool:
        """Whether a part of the model is TorchScript, whose own formulas for gradients know of no casts."""
        modules = () if (model := self._model()) is None else model.modules()
        return any(isinstance(module, torch.jit.ScriptModule) for module in modules)

    @functools.cached_property
    def _has_kernels(self) -> bool:
        if can_dispatch():
            self.autocast.make_kernels()
        return can_dispatch()

    def _lowers_attention(self) -> bool:
        """Whether attention reads keys and values in this dtype, by any op: rules and attentions may come later."""
        return self.autocast.keeps_attention() and lowers_attention(self._model())
