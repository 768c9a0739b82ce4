"""A signal that ends a run in a checkpoint: SIGTERM of a spot machine or a scheduler, SIGUSR1 of a batch system.

Transformers' own ``enable_jit_checkpoint`` waits three seconds, knows SIGTERM alone, may save between backward and
update, where resuming repeats a batch with other random numbers, and lets the program end as if it had finished.
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
    """``train()`` saved :attr:`checkpoint` because of a signal; uncaught, it ends the program with exit code 75."""

    def __init__(self, signal_name: str, checkpoint: str) -> None:
        super().__init__(PREEMPTED_EXIT_CODE)
        self.checkpoint = checkpoint
        self.message = f"{signal_name} ended the run after it saved {checkpoint}"

    def __str__(self) -> str:
        return self.message


class PreemptionCallback(TrainerCallback):
    """Has the Trainer save and stop at the end of the step in which one of :data:`SIGNALS` came to any process.

    A signal for which the program has a handler of its own is left to it. Further signals change nothing: torchrun
    passes those on to its workers that the scheduler has sent to them already.

    Args:
        agree: gives the largest of a number over all processes; a collective call.

    Attributes:
        received: the name of the first signal that came to this process.
        requested: whether the run ends because of one that came to any.
    """

    def __init__(self, agree: Callable[[int], int]) -> None:
        self.received: str | None = None
        self.requested = False
        self._agree = agree

    @contextlib.contextmanager
    def handling_signals(self) -> Iterator[None]:
        """Watch meanwhile; only in the main thread, where Python delivers signals."""
        self.received, self.requested = None, False
        watched = [number for number in SIGNALS if signal.getsignal(number) is signal.SIG_DFL]
        if threading.current_thread() is not threading.main_thread():
            logger.warning("train() runs outside of the main thread: a signal will not end it in a checkpoint")
            watched = []
        for number in watched:
            signal.signal(number, self._handle)
        try:
            yield
        finally:
            for number in watched:
                signal.signal(number, signal.SIG_DFL)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received is None:
            self.received = signal.Signals(number).name
            # os.write and not logging: the signal may have come while this thread holds the lock of a log handler.
            with contextlib.suppress(OSError):  # nobody reads it: no reason to die
                os.write(2, f"{self.received}: saving a checkpoint after this step, then ending\n".encode())

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Save and stop if a signal came; an evaluation that is due here would take the time there is not."""
        if self._agree(int(self.received is not None)):
            self.requested = True
            control.should_save = control.should_training_stop = True
            control.should_evaluate = False

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The epoch has not ended, only the run."""
        if self.requested:
            control.should_save = control.should_evaluate = False
            # With it, the end of training would load the best model and, at save_total_limit=1, remove the checkpoint.
            state.best_model_checkpoint = None
