"""The account of one training step: storages allocated and freed, their categories, and the peak.

Pure bookkeeping without tensors: the recorder feeds it, and :func:`profile_step` reads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum


class Category(StrEnum):
    """The purpose of memory, in the order of reports."""

    MASTER_WEIGHTS = "master weights"
    WORKING_COPIES = "working copies"
    FROZEN_WEIGHTS = "frozen weights"
    GRADIENTS = "gradients"
    OPTIMIZER_STATE = "optimizer state"
    OFFLOAD_WINDOWS = "offload windows"
    ACTIVATIONS = "activations"
    LOGITS_AND_LOSS = "logits and loss"
    TEMPORARIES = "temporaries"
    INPUTS_AND_BUFFERS = "inputs and buffers"


class Phase(StrEnum):
    SETUP = "setup"
    FORWARD = "forward"
    BACKWARD = "backward"
    UPDATE = "update"


@dataclass
class Allocation:
    size_bytes: int
    category: Category  # may become known later (a gradient), for the events that were, too


@dataclass(frozen=True)
class Event:
    """One storage allocated (``sign`` 1) or freed (-1), in ``phase``, at the op named ``op``."""

    allocation: Allocation
    sign: int
    phase: Phase
    op: str


@dataclass(frozen=True)
class StepProfile:
    """The memory of one training step; fields as in :class:`hf_mp.TrainingMemory`."""

    peak_bytes: int
    peak_phase: Phase
    peak_op: str
    bytes_by_category: dict[Category, int]
    by_phase: dict[Phase, dict[Category, int]]


@dataclass
class Ledger:
    """Live storages by key, and all events since :meth:`start_step`."""

    live: dict[int, Allocation] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    phase: Phase = Phase.SETUP

    def start_step(self) -> None:
        """Forget the events so far; live storages are the step's initial state."""
        # What is older than the step is in use from its beginning, and is part of each peak.
        self.events = [Event(allocation, 1, Phase.SETUP, "") for allocation in self.live.values()]

    def allocate(self, key: int, size_bytes: int, category: Category, op: str) -> None:
        allocation = self.live[key] = Allocation(size_bytes, category)
        self.events.append(Event(allocation, 1, self.phase, op))

    def free(self, key: int) -> None:
        """Record a freed storage. What forward frees itself was temporary."""
        allocation = self.live.pop(key)
        # An activation is what forward keeps for backward.
        if self.phase is Phase.FORWARD and allocation.category is Category.ACTIVATIONS:
            allocation.category = Category.TEMPORARIES
        self.events.append(Event(allocation, -1, self.phase, ""))


def profile_step(events: Sequence[Event]) -> StepProfile:
    """Add up the events of one step: its highest use, and that of each of its parts."""
    # In a second pass, since a storage's category may be known only when it is a gradient, or freed by forward.
    in_use = dict.fromkeys(Category, 0)
    total = 0
    highest: dict[Phase, tuple[int, str, dict[Category, int]]] = {}
    for event in events:
        change = event.sign * event.allocation.size_bytes
        in_use[event.allocation.category] += change
        total += change
        if event.phase not in highest or total > highest[event.phase][0]:
            highest[event.phase] = (total, event.op, dict(in_use))
    # What is older than the step counts in each of its parts, and is none itself.
    highest.pop(Phase.SETUP, None)
    phase, (peak_bytes, op, at_peak) = max(highest.items(), key=lambda entry: entry[1][0])
    return StepProfile(peak_bytes, phase, op, at_peak, {part: found for part, (_, _, found) in highest.items()})
