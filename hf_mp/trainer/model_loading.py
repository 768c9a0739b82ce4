"""Load the resumed or best model of a Trainer; tensors that are not loaded are an error."""

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

_STATE = "optimizer.state."  # prefix of PARAMETER.KEY in shards


def load_from_checkpoint(
    trainer: Trainer, own: Callable[..., None], checkpoint: str, model: nn.Module | None = None
) -> None:
    """``own`` is the original ``_load_from_checkpoint``."""
    # Methods of other libraries may have no `model` argument.
    arguments = (checkpoint,) if model is None else (checkpoint, model)
    _load(trainer, own, Path(checkpoint), trainer.model if model is None else model, arguments)


def load_best_model(trainer: Trainer, own: Callable[..., None]) -> None:
    _load(trainer, own, Path(str(trainer.state.best_model_checkpoint)), trainer.model, ())


def _load(trainer: Trainer, own: Callable[..., None], checkpoint: Path, model: Any, arguments: tuple[Any, ...]) -> None:
    if trainer.is_deepspeed_enabled:  # it loads strictly, and its writes change no version counter
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
    is_stock = getattr(own, "__func__", None) in (Trainer._load_from_checkpoint, Trainer._load_best_model)
    has_shards = trainer.is_fsdp_enabled or is_sharded(model)
    # Quantizers save other tensors than those of the model.
    return is_stock and not has_shards and getattr(model, "hf_quantizer", None) is None


def _check_fsdp_file(checkpoint: Path, model: nn.Module) -> None:
    """Raise if trainable parameters are not in the file of FSDP2's full state. A collective call.

    torch writes them with their own values, so their versions change.
    """
    names = _names_in(checkpoint / f"{FSDP_MODEL_NAME}.bin")
    if names is not None:
        trained = [plain_name(name) for name, parameter in model.named_parameters() if parameter.requires_grad]
        check_all_loaded([name for name in trained if name not in names], checkpoint, model)


@contextmanager
def allowing_no_state(trainer: Trainer, checkpoint: str) -> Iterator[None]:
    """Freeze parameters without optimizer state in a checkpoint of FSDP2, for which torch would raise.

    A parameter that never had a gradient has no state, e.g. the head of Gemma 3's vision tower.
    """
    model: Any = trainer.model
    names = _names_with_state(Path(checkpoint)) if trainer.is_fsdp_enabled else None
    without: list[nn.Parameter] = []
    if names is not None:
        without = [p for name, p in model.named_parameters() if p.requires_grad and plain_name(name) not in names]
    try:
        for parameter in without:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in without:
            parameter.requires_grad_(True)


def _names_with_state(checkpoint: Path) -> set[str] | None:
    """Return the names of parameters with optimizer state; None for another format. A collective call."""
    names = _names_in(checkpoint / "optimizer.bin", "state")
    if names is not None:
        return names
    metadata = checkpoint / "optimizer_0" / ".metadata"
    if metadata.is_file():
        with metadata.open("rb") as file:
            stored = ShardMetadata(file).load().state_dict_metadata
        names = {name.removeprefix(_STATE).rpartition(".")[0] for name in stored if name.startswith(_STATE)}
    return _first_of_ranks(names)


def _names_in(path: Path, *keys: str) -> set[str] | None:
    """Return the keys of the mapping under ``keys`` in a file of torch.save, or None. A collective call."""
    names: set[str] | None = None
    with raise_on_all_ranks():
        if path.is_file():
            found = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
            for key in keys:
                found = found[key]
            names = set(found)
    return _first_of_ranks(names)


def _first_of_ranks(names: set[str] | None) -> set[str] | None:
    return next((found for found in gather_from_ranks(names) if found is not None), None)
