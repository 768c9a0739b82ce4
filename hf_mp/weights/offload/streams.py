"""Queues of work on a device, and the events between them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

# Each queue runs its work in order; only events order the work of two.
QUEUES = COMPUTE, INBOUND, OUTBOUND = "compute", "host to device", "device to host"


class Streams:
    """Queues of a device on which work is finished when a call returns, as on a CPU.

    Other code than that of :meth:`run` is work of the compute queue.
    """

    def run(self, queue: str, work: Callable[[], None]) -> None:
        """Append ``work`` to ``queue``."""
        work()

    def record(self, queue: str) -> Any:
        """Return an event that is complete when all present work of ``queue`` is done; None if it is."""
        return None

    def wait(self, queue: str, event: Any) -> None:
        """Have later work of ``queue`` wait for ``event``, if it is not None."""

    def enter(self) -> None:
        """Called before other code reads results of the compute queue."""

    def synchronize(self) -> None:
        """Have the host wait for all copies."""


class DeviceStreams(Streams):
    """Queues of a GPU: its current stream, and one stream for each direction of the bus."""

    # Those of torch.cuda take five to ten times the host time of torch.Stream and torch.accelerator.

    def __init__(self, device: torch.device) -> None:
        self._device, self._copies = device, {queue: torch.Stream(device) for queue in (INBOUND, OUTBOUND)}

    def _stream(self, queue: str) -> torch.Stream:
        return self._copies.get(queue) or torch.accelerator.current_stream(self._device)

    def run(self, queue: str, work: Callable[[], None]) -> None:
        with self._copies.get(queue, contextlib.nullcontext()):
            work()

    def record(self, queue: str) -> Any:
        return self._stream(queue).record_event()

    def wait(self, queue: str, event: Any) -> None:
        if event is not None:
            self._stream(queue).wait_event(event)

    def synchronize(self) -> None:
        for stream in self._copies.values():
            stream.synchronize()


def streams_of(device: torch.device) -> Streams:
    return Streams() if device.type in ("cpu", "meta") else DeviceStreams(device)
