"""Per-thread stack of active autocasts, and the innermost forward of an attached model.

torch.compile traces these functions and supports their side effects.
"""

from __future__ import annotations

import threading

from hf_mp.casting.plan_entry import CustomBackward, Forward, Mode

BOTH_ACTIVE = (
    "torch.autocast was entered inside hf_mp.autocast, and the two would cast each other's results: use hf_mp.autocast "
    "for both, or torch.autocast(..., enabled=False) for an autocast-disabled region"
)


class _ThreadState(threading.local):
    def __init__(self) -> None:
        self.active: list[Mode] = []  # active autocasts, innermost last
        self.forward: Forward | None = None  # innermost; it stores the forward around it
        self.backward: CustomBackward | None = None  # innermost running backward of a custom autograd function


# torch's stack of modes lacks disabled autocasts, and an autocast that makes a call.
state = _ThreadState()


def active_autocast() -> Mode | None:
    """Return the innermost autocast of this thread, enabled or not, or None."""
    return state.active[-1] if state.active else None


def enter_disabled_region(enabled: bool) -> bool:
    """Enter a nested autocast for a ``torch.autocast(enabled=enabled)`` of user code.

    Returns:
        True if a region was entered: the caller ends it with :func:`exit_disabled_region` or its ``__exit__``. False if
            no autocast of hf_mp is active: the caller enters torch's.

    Raises:
        RuntimeError: if torch's autocast would be active inside hf_mp's.
    """
    active, backward = active_autocast(), state.backward
    region: Mode | None = None
    if backward is not None and (active is None or enabled):
        # torch.amp.custom_bwd and checkpoints restore the autocast state of the forward.
        region = backward.autocast_for(enabled)
    if region is None and active is not None:
        if enabled:
            raise RuntimeError(BOTH_ACTIVE)
        region = active.nested_autocast()
    if region is not None:
        region.__enter__()  # not `with`: the exit of the torch.autocast ends the region
    return region is not None


def exit_disabled_region() -> None:
    """Exit the region that :func:`enter_disabled_region` entered."""
    state.active[-1].__exit__(None, None, None)
