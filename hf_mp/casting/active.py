"""The autocasts of a thread, and its innermost forward of an attached model.

Functions that torch.compile traces, with side effects that it knows.
"""

from __future__ import annotations

import threading

from hf_mp.casting.calls import CustomBackward, Forward, Mode

BOTH_ACTIVE = (
    "torch.autocast was entered inside hf_mp.autocast, and the two would cast each other's results: use hf_mp.autocast "
    "for both, or torch.autocast(..., enabled=False) for an FP32 island"
)


class _ThreadState(threading.local):
    def __init__(self) -> None:
        self.active: list[Mode] = []  # the active autocasts, innermost last
        self.forward: Forward | None = None  # innermost; it holds the one around it
        self.backward: CustomBackward | None = None  # innermost backward of a custom autograd function that runs


# Besides torch's own stack of modes, which does not hold an autocast while it makes a call, nor one that is disabled.
state = _ThreadState()


def active_autocast() -> Mode | None:
    """The innermost autocast of this thread, enabled or not; None if no autocast is active."""
    return state.active[-1] if state.active else None


def enter_island(enabled: bool) -> bool:
    """Enter an FP32 island in the active autocast, for a ``torch.autocast(enabled=...)`` that somebody entered.

    Args:
        enabled: whether that enables torch's autocast.

    Returns:
        True if an island was entered: the caller has to end it, by :func:`leave_island` or the island's ``__exit__``.
        False if no autocast of hf_mp is active: the caller enters torch's.

    Raises:
        RuntimeError: if torch's autocast would be active inside hf_mp's.
    """
    ours = active_autocast()
    entered = None
    if state.backward is not None and (ours is None or enabled):
        # Of torch.amp.custom_bwd, or of a checkpoint of one's own: it restores what was active in the forward.
        entered = state.backward.autocast_for(enabled)
    if entered is None:
        if ours is None:
            return False
        if enabled:
            raise RuntimeError(BOTH_ACTIVE)
        entered = ours.island()
    # Not by `with`: the torch.autocast that somebody entered says when the island ends.
    entered.__enter__()
    return True


def leave_island() -> None:
    """Leave the island that :func:`enter_island` entered."""
    state.active[-1].__exit__(None, None, None)
