"""Queues of work on a device, and the events between them: all that is asynchronous in this folder."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

# A queue runs its work in order. Two queues run in any order that no event forbids.
QUEUES = COMPUTE, INBOUND, OUTBOUND = "compute", "host to device", "device to host"


class Streams:
    """The queues of a device on which work is finished when a call returns, as on a CPU.

    Code that is not passed to :meth:`run` is work of the compute queue.
    """

    def run(self, queue: str, work: Callable[[], None]) -> None:
        """Append ``work`` to ``queue``."""
        work()

    def record(self, queue: str) -> Any:
        """An event that is complete when all work is done that ``queue`` has now."""
        return None

    def wait(self, queue: str, event: Any) -> None:
        """Have later work of ``queue`` wait for ``event``; None for an event that is complete."""

    def enter(self) -> None:
        """Called before code that is not passed to :meth:`run` reads results of the compute queue."""

    def synchronize(self) -> None:
        """Have the host wait until all copies are done."""


class DeviceStreams(Streams):
    """The queues of a GPU: its current stream, and one stream for each direction of the bus."""

    # torch.Stream and torch.accelerator: those of torch.cuda take the host five to ten times as long.

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
    """The queues of ``device``."""
    return Streams() if device.type in ("cpu", "meta") else DeviceStreams(device)
