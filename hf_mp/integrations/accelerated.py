"""Patch of accelerate's optimizer wrapper: report skipped steps of attached models."""

from __future__ import annotations

import sys
import weakref
from typing import Any

from hf_mp.casting.torch_patches import Patch, Patches, acquire


def as_accelerated(optimizer: Any) -> Any:
    """Return ``optimizer`` if it is accelerate's wrapper of an optimizer; otherwise None."""
    accelerate: Any = sys.modules.get("accelerate.optimizer")
    return optimizer if accelerate is not None and isinstance(optimizer, accelerate.AcceleratedOptimizer) else None


def patch_accelerate_skip_flag(optimizer: Any) -> weakref.finalize[..., Any] | None:
    """Patch ``step_was_skipped`` of accelerate's wrappers to read that of ``optimizer``.

    Returns a finalizer that removes the patch; None if accelerate is not imported, so that there is no wrapper.
    """
    if "accelerate.optimizer" not in sys.modules:
        return None
    return weakref.finalize(optimizer, acquire(_WRAPPERS))


def _or_of_wrapped(original: Any) -> property:
    def step_was_skipped(self: Any) -> bool:
        """Whether or not the optimizer step was skipped."""
        return bool(original.fget(self) or getattr(self.optimizer, "step_was_skipped", False))

    return property(step_was_skipped)


# accelerate and the Trainer do not advance LR schedulers after a skipped step.
_WRAPPERS = Patches(
    (
        Patch(
            ("accelerate.optimizer:AcceleratedOptimizer.step_was_skipped",),
            _or_of_wrapped,
            "LR schedulers advance on skipped steps",
        ),
    )
)
