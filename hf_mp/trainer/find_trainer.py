"""Find the Trainer that calls a callback, extend its methods, and work around its use of accelerate."""

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
    """Return the Trainer that is calling ``callback``, from the stack; None if there is none."""
    # Transformers does not pass the Trainer to its callbacks.
    for variables in _callers():
        caller = variables.get("self")
        if isinstance(caller, Trainer) and callback in caller.callback_handler.callbacks:
            return caller
    return None


def extend_method(trainer: Trainer, name: str, around: Callable[..., Any]) -> None:
    """Replace the method ``name`` of ``trainer`` by ``around(method, ...)``, unless this was done before.

    Several functions may extend one method. It is set on the instance, for subclasses of other libraries.
    """
    function = inspect.unwrap(getattr(around, "func", around))
    identity = f"{function.__module__}.{function.__qualname__}"
    own = getattr(trainer, name)
    extended_by = getattr(own, "_extended_by", ())
    if identity not in extended_by:
        extended: Any = functools.wraps(own)(functools.partial(around, own))
        extended._extended_by = (*extended_by, identity)
        vars(trainer)[name] = extended


def resumed_checkpoint(trainer: Trainer | None) -> Path | None:
    """Return the checkpoint that the ``train()`` on the stack resumes from; None if there is none."""
    for variables in _callers() if trainer is not None else ():
        # Local variable of Trainer.train and of its inner loop, where True has been replaced by a path.
        checkpoint = variables.get("resume_from_checkpoint")
        if variables.get("self") is trainer and isinstance(checkpoint, (str, os.PathLike)):
            return Path(checkpoint)
    return None


def norm_to_log(trainer: Trainer | None) -> Tensor | None:
    """Return the tensor ``grad_norm`` of the training loop on the stack, which the Trainer logs."""
    for variables in _callers() if trainer is not None else ():
        norm = variables.get("grad_norm")
        if variables.get("self") is trainer and isinstance(norm, Tensor):
            return norm
    return None


def _callers() -> Iterator[dict[str, Any]]:
    """Yield the local variables of each frame on the stack, the innermost first."""
    frame = inspect.currentframe()
    while frame is not None:
        yield frame.f_locals
        frame = frame.f_back


def clear_prepared_mark(trainer: Trainer | None) -> None:
    """Remove accelerate's mark from a model that was prepared for an evaluation.

    ``prepare_model`` returns a marked model unchanged, so training would run without DDP.
    """
    if trainer is None or trainer.is_in_train or trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
        return
    if trainer.model_wrapped is trainer.model:
        vars(trainer.model).pop("_is_accelerate_prepared", None)


def check_regional_compile(trainer: Trainer | None) -> None:
    """Raise a ValueError if ``torch_compile=True`` compiles a whole FSDP2 model instead of its repeated blocks.

    Dynamo cannot trace FSDP2's all-gather while an autocast in Python is active.
    """
    if trainer is None or not trainer.is_fsdp_enabled:
        return
    plugin, model = trainer.accelerator.state.dynamo_plugin, cast(Any, trainer.model)
    is_regional = plugin.use_regional_compilation and (model is None or has_repeated_blocks(model))
    if plugin.backend is not DynamoBackend.NO and not is_regional:
        raise ValueError(
            f"torch_compile=True compiles all of {type(model).__name__}, which torch.compile cannot trace under FSDP2 "
            "once it is attached: set ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION=true, with which equal blocks are "
            "compiled one by one; without a ModuleList of such, compile parts yourself (part.compile()), or use DDP"
        )
