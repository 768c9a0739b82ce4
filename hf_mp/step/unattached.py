"""Hook after every optimizer step that detects the steps of optimizers that are not attached."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from hf_mp.model_index import model_parameters, optimizer_parameters
from hf_mp.step.gradients import NOT_ATTACHED
from hf_mp.weights.fp32_reads import on_stored_values


class _StepHook:
    """Hook of all optimizers, registered while a model is attached.

    Optimizers with ``fused=True`` and kernels of other libraries write weights without raising version counters.

    If the last model is freed, the hook stays until the next :meth:`add` or :meth:`discard`: torch may be iterating
    over its hooks.
    """

    def __init__(self) -> None:
        self._runtimes = weakref.WeakSet[Any]()  # a StepRuntime for each attached model
        self._handle: RemovableHandle | None = None

    def add(self, runtime: Any) -> None:
        self._runtimes.add(runtime)
        self._register()

    def discard(self, runtime: Any) -> None:
        self._runtimes.discard(runtime)
        self._register()

    def _register(self) -> None:
        is_needed = any([runtime.model is not None for runtime in self._runtimes])
        if is_needed and self._handle is None:
            self._handle = register_optimizer_step_post_hook(self._stepped)
        elif not is_needed and self._handle is not None:
            self._handle.remove()
            self._handle = None

    @torch.compiler.disable  # a compiled step calls it outside its graph
    def _stepped(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        guard = getattr(optimizer.step, "hf_mp_guard", None)
        # The step of a copied optimizer has the guard of its original.
        own_runtimes = [] if guard is None or guard.optimizer is not optimizer else guard.runtimes
        if len(self._runtimes) == len(own_runtimes) == 1:
            return  # it is attached to the only model
        for runtime in tuple(self._runtimes):
            if runtime not in own_runtimes and (model := runtime.model) is not None:
                _record_step(runtime, model, optimizer, is_guarded=bool(own_runtimes))

    _stepped.is_internal = True  # the fused update need not call it


STEP_HOOK = _StepHook()


@on_stored_values
def _record_step(runtime: Any, model: Any, optimizer: Optimizer, *, is_guarded: bool) -> None:
    """Record that ``optimizer``, attached to another model if ``is_guarded``, may have written weights of ``model``."""
    in_model = set(map(id, model_parameters(model)))
    written = [one for one in optimizer_parameters(optimizer) if one.requires_grad and id(one) in in_model]
    if not written:
        return
    if is_guarded:  # it skips steps that overflow
        runtime.check.was_used_by_other_model = True
    elif _is_unchecked(runtime, written):
        runtime.check.warn_once(NOT_ATTACHED)
    runtime.weights.layout.note_unseen_writes(written)


def _is_unchecked(runtime: Any, written: list[Any]) -> bool:
    """Return whether no attached optimizer has checked the gradients that an update of ``written`` has used."""
    attached = {id(one) for guard in runtime.guards for one in optimizer_parameters(guard.optimizer)}
    if not attached.issuperset(map(id, written)):
        return True
    # An attached optimizer also has these parameters: this one wraps it, or is a second one. If it has stepped in this
    # iteration, it has checked them. If not, and no weight has changed, the step was skipped.
    return not runtime.scaler.has_stepped and runtime.weights.layout.differ_from_copies(written)
