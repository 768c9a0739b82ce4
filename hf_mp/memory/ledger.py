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
class Moment:
    position: float  # from 0 to 1, among the events of the step
    phase: Phase
    bytes_by_category: dict[Category, int]  # zeros included

    @property
    def total_bytes(self) -> int:
        return sum(self.bytes_by_category.values())


@dataclass(frozen=True)
class StepProfile:
    """The memory of one training step; fields as in :class:`hf_mp.TrainingMemory`."""

    peak_bytes: int
    peak_phase: Phase
    peak_op: str
    bytes_by_category: dict[Category, int]
    timeline: tuple[Moment, ...]


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


def profile_step(events: Sequence[Event], moments: int = 240) -> StepProfile:
    """Add up the events of one step, in at most ``moments`` moments: each the highest use in its stretch of events."""
    # In a second pass, since a storage's category may be known only when it is a gradient, or freed by forward.
    in_use = dict.fromkeys(Category, 0)
    total = 0
    first = next((index for index, event in enumerate(events) if event.phase is not Phase.SETUP), len(events) - 1)
    length = max(1, len(events) - first)
    highest: dict[int, tuple[int, str, Moment]] = {}
    for index, event in enumerate(events):
        change = event.sign * event.allocation.size_bytes
        in_use[event.allocation.category] += change
        total += change
        # Storages from before the step count in each of its moments, and are no moment of their own.
        if index < first:
            continue
        bucket = (index - first) * moments // length
        if bucket not in highest or total > highest[bucket][0]:
            highest[bucket] = (total, event.op, Moment((index - first) / length, event.phase, dict(in_use)))
    peak_bytes, peak_op, peak = max(highest.values(), key=lambda entry: entry[0])
    timeline = tuple(moment for _, _, moment in highest.values())
    return StepProfile(peak_bytes, peak.phase, peak_op, peak.bytes_by_category, timeline)
