"""The queues of a device, simulated: work runs late, in an order that a seed chooses among those that events allow."""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Callable
from typing import Any

from hf_mp.weights.offload.streams import COMPUTE, INBOUND, OUTBOUND, QUEUES, Streams


class Event:
    """Complete once its queue has come to it."""

    is_complete = False


class SimulatedStreams(Streams):
    """Each call may run work that was queued before, as a device does beside the host.

    ``dropped`` is a place in the code, as in ``places``, at which nothing is waited for: a mutant.
    """

    def __init__(self, seed: int, dropped: str | None = None) -> None:
        self._random, self._dropped = random.Random(seed), dropped
        self._queues: dict[str, deque[Any]] = {queue: deque() for queue in QUEUES}
        # How soon each queue runs what it may run; one of 0 waits until it is forced to.
        self._haste = {queue: self._random.choice((0.0, 0.1, 0.5, 0.9)) for queue in QUEUES}
        self._order = self._random.sample(QUEUES, 3)  # in which they are looked at
        self.places: set[str] = set()  # at which something was waited for

    def run(self, queue: str, work: Callable[[], None]) -> None:
        self._queues[queue].append(work)
        self._run_some()

    def record(self, queue: str) -> Event:
        self._queues[queue].append(event := Event())
        return event

    def wait(self, queue: str, event: Event | None) -> None:
        if event is not None and not self._is_dropped(queue):
            self._queues[queue].append((event,))
        self._run_some()

    def enter(self) -> None:
        self._run_until_empty(COMPUTE)

    def synchronize(self) -> None:
        if not self._is_dropped("the host"):
            self._run_until_empty(INBOUND, OUTBOUND)

    def _is_dropped(self, waits: str) -> bool:
        caller = sys._getframe(2)
        if caller.f_code.co_name == "grow":  # waits because memory is freed, which work that is queued here keeps
            return False
        place = f"{caller.f_code.co_name}:{caller.f_lineno}, {waits}"
        self.places.add(place)
        return place == self._dropped

    def _run_some(self) -> None:
        for queue in self._order:
            while self._random.random() < self._haste[queue] and self._run_next(queue):
                pass

    def _run_until_empty(self, *queues: str) -> None:
        others = [queue for queue in self._order if queue not in queues]
        while any([self._queues[queue] for queue in queues]):
            # Others only if they are waited for.
            if not (any(map(self._run_next, queues)) or any(map(self._run_next, others))):
                raise RuntimeError("no queue can go on: the events wait for each other")

    def _run_next(self, queue: str) -> bool:
        """Take the next entry of ``queue``; whether there was one, and its events were complete."""
        entries = self._queues[queue]
        if not entries:
            return False
        entry = entries[0]
        if isinstance(entry, tuple) and not entry[0].is_complete:
            return False
        entries.popleft()
        if isinstance(entry, Event):
            entry.is_complete = True
        elif not isinstance(entry, tuple):
            entry()
        return True
