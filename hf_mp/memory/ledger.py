"""Allocations and frees of one training step, and their peak."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum


class Category(StrEnum):
    """Purpose of memory, in the order of reports."""

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
    category: Category  # may be set after the allocation, for its earlier events as well


@dataclass(frozen=True)
class Event:
    """A storage allocated (``sign`` 1) or freed (-1) in ``phase`` by the op named ``op``."""

    allocation: Allocation
    sign: int
    phase: Phase
    op: str


@dataclass(frozen=True)
class StepProfile:
    """Memory of one training step; fields as in :class:`hf_mp.TrainingMemory`."""

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
        """Replace the events by the allocations of all live storages."""
        self.events = [Event(allocation, 1, Phase.SETUP, "") for allocation in self.live.values()]

    def allocate(self, key: int, size_bytes: int, category: Category, op: str) -> None:
        allocation = self.live[key] = Allocation(size_bytes, category)
        self.events.append(Event(allocation, 1, self.phase, op))

    def free(self, key: int) -> None:
        """An activation that is freed during forward becomes a temporary."""
        allocation = self.live.pop(key)
        if self.phase is Phase.FORWARD and allocation.category is Category.ACTIVATIONS:
            allocation.category = Category.TEMPORARIES
        self.events.append(Event(allocation, -1, self.phase, ""))


def profile_step(events: Sequence[Event]) -> StepProfile:
    """Compute the peaks after the step, when all categories are final."""
    in_use = dict.fromkeys(Category, 0)
    total = 0
    peaks: dict[Phase, StepProfile] = {}
    for event in events:
        change = event.sign * event.allocation.size_bytes
        in_use[event.allocation.category] += change
        total += change
        if event.phase not in peaks or total > peaks[event.phase].peak_bytes:
            peaks[event.phase] = StepProfile(total, event.phase, event.op, dict(in_use), by_phase={})
    peaks.pop(Phase.SETUP, None)
    highest = max(peaks.values(), key=lambda peak: peak.peak_bytes)
    return replace(highest, by_phase={phase: peak.bytes_by_category for phase, peak in peaks.items()})
