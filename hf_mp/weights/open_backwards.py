"""``OpenBackwards``: the backwards that run, in whatever thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class OpenBackwards:
    """Which backwards came in through an output of a model, so that its gradients are scaled, and have not ended."""

    def __init__(self) -> None:
        self._threads: dict[int, int] = {}  # autograd's number of a backward -> the thread in which it began
        self._paused = threading.local()

    def __bool__(self) -> bool:
        return bool(self._threads) and not getattr(self._paused, "is_on", False)

    def begin(self, task: int) -> bool:
        """Take in a backward by its number; False if it is known."""
        is_new = task not in self._threads
        self._threads[task] = threading.get_ident()
        return is_new

    def end(self, task: int) -> None:
        """A backward has ended."""
        self._threads.pop(task, None)

    def forget_failed(self) -> None:
        """Outside a backward: what is still open in this thread, or in one of autograd's, has raised."""
        if self._threads and torch._C._current_graph_task_id() == -1:
            others = {thread.ident for thread in threading.enumerate()} - {threading.get_ident()}
            self._threads = {task: thread for task, thread in self._threads.items() if thread in others}

    @contextmanager
    def paused(self) -> Iterator[None]:
        """To run forward code in that a backward calls: what it differentiates itself is not scaled."""
        before, self._paused.is_on = getattr(self._paused, "is_on", False), True
        try:
            yield
        finally:
            self._paused.is_on = before
