"""A Trainer that takes one step at a time, so that several take turns."""

from __future__ import annotations

import contextvars
import threading
from typing import Any

from accelerate.state import AcceleratorState, GradientState, PartialState
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments


class StepByStep:
    """Runs ``trainer.train()`` on a thread of its own that waits at the beginning of each step.

    A step is all that the Trainer's loop does from ``on_step_begin`` to the next: the loading of the batch, logging and
    callbacks included. What it raises is raised by :meth:`step`.

    accelerate keeps one state for the whole process, which each new Trainer replaces: the mixed precision that decides
    whether gradients are unscaled before they are clipped is in it. Each step finds that of its own Trainer.

    Args:
        trainer: the one that was made last, with more ``max_steps`` than will be taken.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._go = threading.Semaphore(0)
        self._done = threading.Semaphore(0)
        self._error: BaseException | None = None
        self._ended = False
        self._is_closing = False
        trainer.add_callback(_Pause(self))
        # torch keeps settings, those of its compiler among them, for each context
        context = contextvars.copy_context()
        self._thread = threading.Thread(target=context.run, args=(self._train, trainer), daemon=True)
        self._thread.start()
        self._wait()
        self._state = _accelerate_state()

    def step(self) -> None:
        """Take one step.

        Raises:
            RuntimeError: if the training has ended.
        """
        if self._ended:
            raise RuntimeError("this training has ended: give its TrainingArguments more max_steps")
        _set_accelerate_state(self._state)
        self._go.release()
        self._wait()
        self._state = _accelerate_state()

    def close(self) -> None:
        """End the training after one more step, and wait for it."""
        self._is_closing = True
        if not self._ended:
            self.step()
        self._thread.join()

    def _train(self, trainer: Trainer) -> None:
        try:
            trainer.train()
        except BaseException as error:  # given to the thread that waits for the step
            self._error = error
        finally:
            self._ended = True
            self._done.release()

    def _wait(self) -> None:
        self._done.acquire()
        if self._error is not None:
            raise self._error


_SHARED: tuple[Any, ...] = (PartialState, AcceleratorState, GradientState)


def _accelerate_state() -> list[dict[str, Any]]:
    return [dict(shared._shared_state) for shared in _SHARED]


def _set_accelerate_state(states: list[dict[str, Any]]) -> None:
    # in place: every object of these classes has this very dictionary for its attributes
    for shared, state in zip(_SHARED, states, strict=True):
        shared._shared_state.clear()
        shared._shared_state.update(state)


class _Pause(TrainerCallback):
    def __init__(self, steps: StepByStep) -> None:
        self._steps = steps

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._steps._done.release()
        self._steps._go.acquire()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        control.should_training_stop = control.should_training_stop or self._steps._is_closing
