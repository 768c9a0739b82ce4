"""Load the resumed or best model of a Trainer: restore each tensor, or raise an error that names the others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate.utils.constants import FSDP_MODEL_NAME
from torch import nn
from transformers import Trainer

from hf_mp.diagnostics.contract.folders import ShardMetadata
from hf_mp.model_index import plain_name
from hf_mp.ranks.parallelism import is_sharded
from hf_mp.trainer.checkpoints import loaded_state
from hf_mp.trainer.checkpoints.saved_names import check_all_loaded, load_weights, require_all_loaded, weight_files
from hf_mp.trainer.checkpoints.shards import gather_from_ranks, raise_on_all_ranks

_STATE = "optimizer.state."  # before the name of a parameter and the name of its state, in shards


def load_from_checkpoint(
    trainer: Trainer, own: Callable[..., None], checkpoint: str, model: nn.Module | None = None
) -> None:
    """Load the model of ``checkpoint`` for ``own``, the method of ``trainer`` or of its library.

    Raises:
        CheckpointError: naming what does not fit, and parameters that train and would stay as they are.
    """
    loaded: Any = trainer.model if model is None else model
    # A library's own method may take the checkpoint alone.
    _load(trainer, own, Path(checkpoint), loaded, (checkpoint,) if model is None else (checkpoint, model))


def load_best_model(trainer: Trainer, own: Callable[..., None]) -> None:
    """Load the best model of a run as :func:`load_from_checkpoint` loads the model of a checkpoint."""
    loaded: Any = trainer.model
    _load(trainer, own, Path(str(trainer.state.best_model_checkpoint)), loaded, ())


def _load(
    trainer: Trainer, own: Callable[..., None], checkpoint: Path, model: nn.Module, arguments: tuple[Any, ...]
) -> None:
    if trainer.is_deepspeed_enabled:  # FP32 alone: it loads strictly, and writes past the versions of parameters
        own(*arguments)
        return
    with loaded_state.as_checkpoint_error(checkpoint, "the model"), require_all_loaded(checkpoint, model):
        files = weight_files(checkpoint) if _reads_plain_files(trainer, own, model) else []
        if files:
            load_weights(files, model)
            return
        if trainer.is_fsdp_enabled:
            _check_fsdp_file(checkpoint, model)
        own(*arguments)


def _reads_plain_files(trainer: Trainer, own: Any, model: nn.Module) -> bool:
    """Whether ``own`` is the stock method, and reads the files of ``save_pretrained`` by the names of ``model``."""
    is_stock = getattr(own, "__func__", None) in (Trainer._load_from_checkpoint, Trainer._load_best_model)
    is_spread = trainer.is_fsdp_enabled or is_sharded(model)
    # A quantizer saves other tensors than those of the model.
    return is_stock and not is_spread and getattr(model, "hf_quantizer", None) is None


def _check_fsdp_file(checkpoint: Path, model: nn.Module) -> None:
    """Raise for parameters that train and are not in the one file of FSDP2's whole state; a collective call.

    torch also writes the parameters that the file does not have, with their own values, so their versions change.
    """
    names = _names_in(checkpoint / f"{FSDP_MODEL_NAME}.bin")
    if names is not None:
        trained = [plain_name(name) for name, parameter in model.named_parameters() if parameter.requires_grad]
        check_all_loaded([name for name in trained if name not in names], checkpoint, model)


@contextmanager
def allowing_no_state(trainer: Trainer, checkpoint: str) -> Iterator[None]:
    """Freeze, within the context, parameters that have no optimizer state in a checkpoint of FSDP2.

    A parameter that never gets a gradient has none, such as the head of Gemma 3's vision tower. torch raises for a
    parameter that trains and has no state in the checkpoint.
    """
    model: Any = trainer.model
    names = _names_with_state(Path(checkpoint)) if trainer.is_fsdp_enabled else None
    named = [] if names is None else [(plain_name(n), p) for n, p in model.named_parameters() if p.requires_grad]
    without = [parameter for name, parameter in named if name not in (names or ())]
    try:
        for parameter in without:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in without:
            parameter.requires_grad_(True)


def _names_with_state(checkpoint: Path) -> set[str] | None:
    """Return the names of the parameters with a state in an optimizer that accelerate saved; a collective call.

    None if there is none, or if it is in another format.
    """
    if (names := _names_in(checkpoint / "optimizer.bin", "state")) is not None:
        return names
    metadata = checkpoint / "optimizer_0" / ".metadata"
    if metadata.is_file():
        with metadata.open("rb") as file:
            stored = ShardMetadata(file).load().state_dict_metadata
        states = [name.removeprefix(_STATE) for name in stored if name.startswith(_STATE)]
        names = {name.rpartition(".")[0] for name in states}
    return _of_any_process(names)


def _names_in(path: Path, *keys: str) -> set[str] | None:
    """Return the names in a file of torch.save, under ``keys``; None if no process has it; a collective call."""
    names: set[str] | None = None
    with raise_on_all_ranks():
        if path.is_file():
            found = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
            for key in keys:
                found = found[key]
            names = set(found)
    return _of_any_process(names)


def _of_any_process(names: set[str] | None) -> set[str] | None:
    # Only the first process may have the file.
    return next((found for found in gather_from_ranks(names) if found is not None), None)
