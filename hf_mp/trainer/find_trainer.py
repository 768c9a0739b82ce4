"""The Trainer that calls a callback, to which it gives neither itself nor its list of callbacks; what it gets wrong."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

from accelerate.utils import DynamoBackend
from accelerate.utils.other import has_repeated_blocks
from torch import Tensor
from transformers import Trainer, TrainerCallback


def find_calling_trainer(callback: TrainerCallback) -> Trainer | None:
    """Found where the call comes from; None where no Trainer with this callback calls."""
    # Transformers hands a callback its arguments, state and model, but never the Trainer itself.
    for variables in _callers():
        caller = variables.get("self")
        if isinstance(caller, Trainer) and callback in caller.callback_handler.callbacks:
            return caller
    return None


def extend_method(trainer: Trainer, name: str, around: Callable[..., Any]) -> None:
    """Have ``around`` run in the place of a method of ``trainer``, which is its first argument; once for each Trainer.

    Another function may extend the same method before or after.
    """
    # On the instance, which reaches subclasses of other libraries too. Once, as a callback is called at each train().
    function = inspect.unwrap(getattr(around, "func", around))
    by = f"{function.__module__}.{function.__qualname__}"
    own = getattr(trainer, name)
    if by not in (extended_by := getattr(own, "_extended_by", ())):
        extended: Any = functools.wraps(own)(functools.partial(around, own))
        extended._extended_by = (*extended_by, by)
        vars(trainer)[name] = extended


def resumed_checkpoint(trainer: Trainer | None) -> Path | None:
    """What a training of ``trainer`` that begins is resumed from, which a callback is not told."""
    for variables in _callers() if trainer is not None else ():
        # Trainer.train and its inner loop have it under this name, the inner one as a path also where True was given.
        checkpoint = variables.get("resume_from_checkpoint")
        if variables.get("self") is trainer and isinstance(checkpoint, (str, os.PathLike)):
            return Path(checkpoint)
    return None


def norm_to_log(trainer: Trainer | None) -> Tensor | None:
    """The norm of the gradients that a training of ``trainer``, which steps now, will log: its own tensor."""
    for variables in _callers() if trainer is not None else ():
        if variables.get("self") is trainer and isinstance(norm := variables.get("grad_norm"), Tensor):
            return norm
    return None


def _callers() -> Iterator[dict[str, Any]]:
    """The variables of each function that waits for this one, the innermost first."""
    frame = inspect.currentframe()
    while frame is not None:
        yield frame.f_locals
        frame = frame.f_back


def clear_prepared_mark(trainer: Trainer | None) -> None:
    """Have a model that was prepared for an evaluation be wrapped when training begins.

    accelerate marks it as prepared and would leave it without DDP: each process would train alone.
    """
    if trainer is None or trainer.is_in_train or trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
        return
    # accelerate's prepare_model returns a model with this attribute as it is, without DDP around it.
    if trainer.model_wrapped is trainer.model:
        vars(trainer.model).pop("_is_accelerate_prepared", None)


def check_regional_compile(trainer: Trainer | None) -> None:
    """Raise where ``torch_compile=True`` compiles all of a model that FSDP2 shards, not its equal blocks one by one.

    Dynamo cannot trace FSDP's gathering of parameters while an autocast in Python is active.

    Raises:
        ValueError: naming the ways out.
    """
    if trainer is None or not trainer.is_fsdp_enabled:
        return
    plugin, model = trainer.accelerator.state.dynamo_plugin, cast(Any, trainer.model)
    by_blocks = plugin.use_regional_compilation and (model is None or has_repeated_blocks(model))
    if plugin.backend is not DynamoBackend.NO and not by_blocks:
        raise ValueError(
            f"torch_compile=True compiles all of {type(model).__name__}, which torch.compile cannot trace under FSDP2 "
            "once it is attached: set ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION=true, with which equal blocks are "
            "compiled one by one; without a ModuleList of such, compile parts yourself (part.compile()), or use DDP"
        )
