"""``CheckpointLoader``: checks the state that a Trainer loads."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from transformers import Trainer

from hf_mp.trainer.checkpoints import loaded_state
from hf_mp.trainer.find_trainer import extend_method, resumed_checkpoint
from hf_mp.trainer.model_loading import allowing_no_state
from hf_mp.trainer.session import TrainerSession

_LOADED = {  # by method of the Trainer
    "_load_rng_state": "the state of the random numbers",
    "_load_callback_state": "the state of the callbacks",
}


class CheckpointLoader:
    """Wraps the load methods of ``trainer``: invalid state raises a CheckpointError.

    ``session`` returns the session of the run, or None to leave a load to the Trainer.
    """

    def __init__(self, trainer: Trainer, session: Callable[[], TrainerSession | None]) -> None:
        self._trainer, self._session = trainer, session
        for method, what in _LOADED.items():
            extend_method(trainer, method, functools.partial(self._load, what))
        extend_method(trainer, "_load_optimizer_and_scheduler", self._load_optimizer_and_scheduler)

    def _load(self, what: str, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._session() is None:
            return own(*args, **kwargs)
        # _load_callback_state() has no path argument.
        checkpoint = args[0] if args else resumed_checkpoint(self._trainer)
        with loaded_state.as_checkpoint_error(str(checkpoint), what):
            return own(*args, **kwargs)

    def _load_optimizer_and_scheduler(self, own: Callable[..., None], checkpoint: str | None) -> None:
        trainer: Any = self._trainer
        if checkpoint is None:
            own(checkpoint)
            return
        is_checked = self._session() is not None
        check = loaded_state.checking(checkpoint, trainer.optimizer, trainer.lr_scheduler)
        with check if is_checked else nullcontext(), allowing_no_state(trainer, checkpoint):
            own(checkpoint)
