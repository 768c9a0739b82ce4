"""Find the Trainer that calls a callback, extend its methods, and work around accelerate."""

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
    """Return the Trainer on the stack that is calling ``callback``, or None."""
    # Transformers does not pass the Trainer to its callbacks.
    trainers = (variables["self"] for variables in _callers() if isinstance(variables.get("self"), Trainer))
    return next((trainer for trainer in trainers if callback in trainer.callback_handler.callbacks), None)


def extend_method(trainer: Trainer, name: str, around: Callable[..., Any]) -> None:
    """Replace the method ``name`` of ``trainer`` by ``around(method, ...)``, unless this was done before.

    Several functions may extend one method. It is set on the instance, for subclasses of other libraries.
    """
    # Each call creates a new partial or closure, so functions are compared by name.
    function = inspect.unwrap(getattr(around, "func", around))
    function_name = f"{function.__module__}.{function.__qualname__}"
    own = getattr(trainer, name)
    extended_by = getattr(own, "_extended_by", ())
    if function_name not in extended_by:
        extended: Any = functools.wraps(own)(functools.partial(around, own))
        extended._extended_by = (*extended_by, function_name)
        vars(trainer)[name] = extended


def resumed_checkpoint(trainer: Trainer | None) -> Path | None:
    """Return the checkpoint that the ``train()`` on the stack resumes from, or None."""
    # In train() and its inner loop, where True has been replaced by a path.
    checkpoint = _find_variable(trainer, "resume_from_checkpoint", (str, os.PathLike))
    return None if checkpoint is None else Path(checkpoint)


def norm_to_log(trainer: Trainer | None) -> Tensor | None:
    """Return the tensor that the training loop on the stack logs as ``grad_norm``, or None."""
    return cast("Tensor | None", _find_variable(trainer, "grad_norm", Tensor))


def _find_variable(trainer: Trainer | None, name: str, kind: Any) -> Any:
    """Return the innermost variable ``name`` of class ``kind`` in the methods of ``trainer`` on the stack, or None."""
    if trainer is None:
        return None
    values = (variables.get(name) for variables in _callers() if variables.get("self") is trainer)
    return next((value for value in values if isinstance(value, kind)), None)


def _callers() -> Iterator[dict[str, Any]]:
    """Yield the local variables of each frame, the innermost first."""
    frame = inspect.currentframe()
    while frame is not None:
        yield frame.f_locals
        frame = frame.f_back


def clear_prepared_mark(trainer: Trainer | None) -> None:
    """Remove accelerate's mark of a model that was prepared for an evaluation: with it, training runs without DDP."""
    if trainer is None or trainer.is_in_train or trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
        return
    if trainer.model_wrapped is trainer.model:
        vars(trainer.model).pop("_is_accelerate_prepared", None)


def check_regional_compile(trainer: Trainer | None) -> None:
    """Raise a ValueError if ``torch_compile=True`` compiles a whole FSDP2 model.

    Dynamo cannot trace FSDP2's all-gather while an autocast in Python is active.
    """
    if trainer is None or not trainer.is_fsdp_enabled:
        return
    plugin, model = trainer.accelerator.state.dynamo_plugin, cast(Any, trainer.model)
    if plugin.backend is DynamoBackend.NO:
        return
    can_be_regional = model is None or has_repeated_blocks(model)
    if not (plugin.use_regional_compilation and can_be_regional):
        raise ValueError(
            f"torch_compile=True compiles all of {type(model).__name__}, which torch.compile cannot trace under FSDP2 "
            "once it is attached: set ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION=true, with which equal blocks are "
            "compiled one by one; without a ModuleList of such, compile parts yourself (part.compile()), or use DDP"
        )
