"""Save a checkpoint and end the run on SIGTERM (spot machines, schedulers) or SIGUSR1 (batch systems).

Transformers' ``enable_jit_checkpoint`` handles SIGTERM only, waits 3 s, exits with code 0, and may save between
backward and update: the resumed run repeats a batch.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from transformers import TrainerCallback
from transformers.utils import logging

logger = logging.get_logger(__name__)

PREEMPTED_EXIT_CODE = 75  # EX_TEMPFAIL of sysexits.h: try again later
SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name))


class Preempted(SystemExit):
    """Raised after :attr:`checkpoint` was saved because of a signal; the exit code is 75."""

    def __init__(self, signal_name: str, checkpoint: str) -> None:
        super().__init__(PREEMPTED_EXIT_CODE)
        self.checkpoint = checkpoint
        self.message = f"{signal_name} ended the run after it saved {checkpoint}"

    def __str__(self) -> str:
        return self.message


class PreemptionCallback(TrainerCallback):
    """Saves and stops at the end of the step in which any process received one of :data:`SIGNALS`.

    Later signals, which torchrun may forward, have no effect.

    Attributes:
        received: name of the first signal of this process, or None.
        requested: whether the run ends because of a signal to any process.
    """

    def __init__(self, max_over_ranks: Callable[[int], int]) -> None:
        self.received: str | None = None
        self.requested = False
        self._max_over_ranks = max_over_ranks

    @contextlib.contextmanager
    def handling_signals(self) -> Iterator[None]:
        """Handle the signals for which the program has no handler; only in the main thread."""
        self.received, self.requested = None, False
        handled = [number for number in SIGNALS if signal.getsignal(number) is signal.SIG_DFL]
        if threading.current_thread() is not threading.main_thread():
            logger.warning("train() runs outside of the main thread: a signal will not end it in a checkpoint")
            handled = []
        for number in handled:
            signal.signal(number, self._handle)
        try:
            yield
        finally:
            for number in handled:
                signal.signal(number, signal.SIG_DFL)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received is None:
            self.received = signal.Signals(number).name
            # Not by logging: this thread may hold the lock of a log handler.
            with contextlib.suppress(OSError):  # stderr may be closed
                os.write(2, f"{self.received}: saving a checkpoint after this step, then ending\n".encode())

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._max_over_ranks(int(self.received is not None)):
            self.requested = True
            control.should_save = control.should_training_stop = True
            control.should_evaluate = False

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Cancel the save and evaluation of the epoch, which has not ended."""
        if self.requested:
            control.should_save = control.should_evaluate = False
            # Otherwise the Trainer loads the best model and, with save_total_limit=1, removes the new checkpoint.
            state.best_model_checkpoint = None
