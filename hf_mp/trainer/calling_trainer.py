"""The Trainer that calls a callback, to which it gives neither itself nor its list of callbacks; what it gets wrong."""

from __future__ import annotations

import inspect

from accelerate.utils import DynamoBackend
from transformers import Trainer, TrainerCallback
from transformers.utils import logging

logger = logging.get_logger(__name__)


def calling_trainer(callback: TrainerCallback) -> Trainer | None:
    """Found where the call comes from; None where no Trainer with this callback calls."""
    frame = inspect.currentframe()
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, Trainer) and callback in caller.callback_handler.callbacks:
            return caller
        frame = frame.f_back
    return None


def come_first(callback: TrainerCallback, trainer: Trainer) -> list[TrainerCallback]:
    """Move to the front of a Trainer's callbacks, so that those which report see what this one adds to the logs.

    Returns:
        The Trainer's callbacks.

    Raises:
        ValueError: for a second one of its class.
    """
    callbacks = trainer.callback_handler.callbacks
    if sum(isinstance(other, type(callback)) for other in callbacks) > 1:
        raise ValueError(
            f"this Trainer has more than one {type(callback).__name__}, and a loss can be scaled only once: leave one"
        )
    callbacks.remove(callback)
    callbacks.insert(0, callback)
    return callbacks


def forget_prepared(trainer: Trainer | None) -> None:
    """Have a model that was prepared for an evaluation be wrapped when training begins.

    accelerate marks it as prepared and would leave it without DDP: each process would train alone.
    """
    if trainer is None or trainer.is_in_train or trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
        return
    if trainer.model_wrapped is trainer.model:
        vars(trainer.model).pop("_is_accelerate_prepared", None)


def compile_by_blocks(trainer: Trainer | None) -> None:
    """Have accelerate compile the repeated blocks of a model that FSDP2 shards, where it would compile all of it.

    Dynamo cannot trace FSDP's gathering of parameters while an autocast in Python is active.
    """
    if trainer is None or not trainer.is_fsdp_enabled:
        return
    plugin = trainer.accelerator.state.dynamo_plugin
    if plugin.backend is not DynamoBackend.NO and not plugin.use_regional_compilation:
        plugin.use_regional_compilation = True
        logger.warning(
            "torch_compile=True compiles the repeated blocks of the model, one by one: torch.compile cannot trace a "
            "whole attached model under FSDP2. ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION=true says the same"
        )
